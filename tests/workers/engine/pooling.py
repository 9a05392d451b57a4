"""Cores with tiny models that pool, driven until all texts are done."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.workers.engine.models.tiny_pooling_models import second_text_of, texts
from tests.workers.engine.places import Place
from tests.workers.engine.scheduling.integrity import check_idle
from workers.engine.core import EngineCore
from workers.engine.device.executor import Executor
from workers.engine.messages.config import EngineConfig
from workers.engine.messages.core import EngineRequest, Finish, PoolingParams, SamplingParams

TOLERANCE = 1e-4
EMBED = PoolingParams("embed")


def start(path: Path, place: Place, **settings: Any) -> EngineCore:
    """A core that needs several steps for the texts; `settings` are more of the configuration."""
    small: dict[str, Any] = {"max_num_batched_tokens": 128, "max_num_seqs": 4, "kv_cache_memory_bytes": 16 << 20}
    return EngineCore(Executor(EngineConfig(model=str(path), threads=1, **small | place.settings() | settings)))


def run_pooling(core: EngineCore, requests: list[EngineRequest]) -> list[Tensor]:
    """What the core makes of requests that come together, which are numbered from 0 on."""
    found: dict[int, Tensor] = {}
    core.add(requests)
    while core.busy:
        output = core.step()
        for row, number in enumerate(output.request_ids if output is not None else []):
            assert output is not None
            assert (output.counts[row], Finish(output.finish[row])) == (0, Finish.STOP), output.errors
            found[number] = torch.from_numpy(np.frombuffer(output.pooled[number], "<f4").copy())
    check_idle(core.scheduler)
    return [found[number] for number in range(len(requests))]


def pooling_requests(params: PoolingParams, name: str = "bert") -> list[EngineRequest]:
    return [
        EngineRequest(
            number, text, [], SamplingParams(0), live=number % 3 == 2, pooling=params,
            second_text=second_text_of(name, text),
        )
        for number, text in enumerate(texts())
    ]  # fmt: skip


def assert_close(got: list[Tensor], expected: list[Tensor]) -> None:
    assert [len(one) for one in got] == [one.numel() for one in expected]
    assert max(float((a - b.flatten()).abs().max()) for a, b in zip(got, expected, strict=True)) < TOLERANCE
