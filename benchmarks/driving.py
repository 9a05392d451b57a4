"""The engine as a worker drives it: `AsyncEngine` in this process, its core in one of its own,
requests as token ids.
"""

import json
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.models import model_folder
from benchmarks.workload import write_workload
from workers.engine.checkpoint.dtypes import cpu_dtype
from workers.engine.client.async_engine import AsyncEngine
from workers.engine.messages.config import EngineConfig
from workers.engine.messages.core import EngineRequest, SamplingParams

CONTEXT = 1024  # tokens, of every engine that is compared
_WARM_UP_REQUESTS = 8


@dataclass(frozen=True, slots=True)
class Pass:
    """Requests submitted at once, measured until the last token."""

    seconds: float
    output_tokens: int
    computed_tokens: int  # tokens run through the model
    cached_tokens: int
    preemptions: int
    steps: int

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds

    def figures(self) -> dict[str, Any]:
        return {
            "seconds": round(self.seconds, 2),
            "output_tokens": self.output_tokens,
            "computed_tokens": self.computed_tokens,
            "cached_tokens": self.cached_tokens,
            "preemptions": self.preemptions,
            "steps": self.steps,
            "output_tokens_per_second": round(self.tokens_per_second, 1),
        }


def engine_dtype() -> str:
    """Return the dtype of `--dtype auto` on this machine, for the bfloat16 checkpoints."""
    return str(cpu_dtype()).removeprefix("torch.")


@asynccontextmanager
async def running_engine(
    model: str, vocabulary: Callable[[], list[bytes]] | None = None, **settings: Any
) -> AsyncIterator[AsyncEngine]:
    """Run an engine with `model` of `SHAPES`.

    It is warm: it has answered some short requests that share nothing with any workload.
    """
    config = EngineConfig(model=str(model_folder(model)), **{"device": "cpu", "max_model_len": CONTEXT, **settings})
    engine = AsyncEngine(config, vocabulary=vocabulary)
    await engine.start()
    try:
        sampling = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
        await run_pass(
            engine, [EngineRequest(row, [1000 + row] * 40, [], sampling) for row in range(_WARM_UP_REQUESTS)]
        )
        yield engine
    finally:
        await engine.stop()


async def run_pass(engine: AsyncEngine, requests: list[EngineRequest]) -> Pass:
    """Submit all requests and wait for the last token. Raises RuntimeError if one failed."""
    before, began = engine.stats, time.perf_counter()
    engine.add(requests)
    unfinished, tokens = len(requests), 0
    async for output in engine.steps():
        if output.errors:
            raise RuntimeError(next(iter(output.errors.values())))
        tokens += len(output.token_ids)
        unfinished -= sum(map(bool, output.finish))
        if not unfinished:
            break
    seconds, after = time.perf_counter() - began, engine.stats
    return Pass(
        seconds,
        tokens,
        after.computed_tokens - before.computed_tokens,
        after.prefix_hit_tokens - before.prefix_hit_tokens,
        after.preemptions - before.preemptions,
        after.steps - before.steps,
    )


def workload(model: str, kind: str, requests: int, seed: int) -> list[EngineRequest]:
    """Return the lines of `write_workload`, rendered and tokenized as by a worker."""
    with tempfile.TemporaryDirectory() as scratch:
        return tokenized(write_workload(Path(scratch) / "input.jsonl", kind, requests, model, seed), model)


def tokenized(path: Path, model: str) -> list[EngineRequest]:
    """Return a batch file's lines in their order; ids count from 0."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder(model))
    requests = []
    for index, line in enumerate(path.open()):
        body = json.loads(line)["body"]
        if "prompt" in body:
            token_ids = tokenizer(body["prompt"])["input_ids"]
        else:
            text = tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, tokenize=False)
            token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        requests.append(
            EngineRequest(
                index, token_ids, [], SamplingParams(max_tokens=body["max_tokens"], temperature=0, ignore_eos=True)
            )
        )
    return requests


def greedy(prompt: list[int], tokens: int, request_id: int) -> EngineRequest:
    """Return one greedy request of exactly `tokens` tokens."""
    return EngineRequest(request_id, prompt, [], SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True))
