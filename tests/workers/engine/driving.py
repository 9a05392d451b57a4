"""A core with a tiny model in this process, driven until all requests have ended."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.workers.engine.cache_sizes import block_bytes
from tests.workers.engine.models.tiny_models import folder
from tests.workers.engine.places import CPU, Place
from tests.workers.engine.scheduling.integrity import check_idle
from workers.engine.checkpoint.model_checkpoint import open_checkpoint
from workers.engine.core import EngineCore
from workers.engine.cuda.graphs import Work
from workers.engine.device.executor import Executor
from workers.engine.device.resolve import resolve
from workers.engine.messages.config import EngineConfig
from workers.engine.messages.core import EngineRequest, Finish, TokenLogprobs
from workers.engine.messages.resolved_config import ResolvedConfig

BLOCK_SIZE = 16


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish: Finish = Finish.RUNNING
    error: str = ""


@dataclass
class Run:
    answers: dict[int, Answer]
    preemptions: int = 0
    prefix_hit_tokens: int = 0


def make_core(name: str, *, num_blocks: int = 400, place: Place = CPU, **settings: Any) -> EngineCore:
    """A core for one of the tiny models; `num_blocks` KV blocks of 16 tokens, the null block among
    them.
    """
    per_block = block_bytes(open_checkpoint(str(folder(name))).config, torch.float32, BLOCK_SIZE)
    config = EngineConfig(
        model=str(folder(name)),
        threads=torch.get_num_threads(),
        block_size=BLOCK_SIZE,
        kv_cache_memory_bytes=num_blocks * per_block,
        **place.settings(),
        **settings,
    )
    return EngineCore(Executor(config))


def resolved(name: str, **settings: Any) -> ResolvedConfig:
    """What a replica of one of the tiny models runs with."""
    config = EngineConfig(model=str(folder(name)), **settings)
    return resolve(config, config.device, open_checkpoint(config.model).config)


def recorded(work: Work) -> Work:
    """Replace a CUDA graph where there is none: as in a recording, the work runs once before."""
    work()
    return work


def run(core: EngineCore, requests: Sequence[EngineRequest]) -> Run:
    """What the core answers to requests that come all at once."""
    result = Run({request.request_id: Answer() for request in requests})
    core.add(requests)
    while core.busy:
        output = core.step()
        if output is None:
            continue
        result.preemptions, result.prefix_hit_tokens = output.stats.preemptions, output.stats.prefix_hit_tokens
        flat = iter(output.token_ids)
        for row, number in enumerate(output.request_ids):
            answer = result.answers[number]
            assert answer.finish is Finish.RUNNING
            if number in output.prompt_logprobs:
                assert answer.tokens == []
                assert answer.prompt_logprobs is None
                answer.prompt_logprobs = output.prompt_logprobs[number]
            answer.tokens += [next(flat) for _ in range(output.counts[row])]
            answer.logprobs += output.logprobs.get(number, [])
            answer.finish = Finish(output.finish[row])
            answer.error = output.errors.get(number, "")
    check_idle(core.scheduler)
    return result
