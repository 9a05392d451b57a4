"""Embeddings and classes equal transformers' classes and sentence-transformers' arithmetic, for
every family, through the real scheduler and runner: texts of very different lengths come together.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.workers.engine.models.tiny_pooling_models import (
    CLASSIFIERS,
    EMBEDDERS,
    hidden_states,
    logits,
    make_pooling_model,
    normalized,
    pooled,
    pooling_folder,
    second_text_of,
    texts,
)
from tests.workers.engine.places import Place, at_all, interpreted
from tests.workers.engine.scheduling.integrity import check_idle
from workers.engine.core import EngineCore
from workers.engine.device.executor import Executor
from workers.engine.messages.config import EngineConfig
from workers.engine.messages.core import EngineRequest, Finish, PoolingParams, SamplingParams

TOLERANCE = 1e-4
EMBED = PoolingParams("embed")


def start(path: Path, place: Place, **settings: Any) -> EngineCore:
    """A core that needs several steps for the texts; `settings` are more of the configuration."""
    small: dict[str, Any] = {"max_num_batched_tokens": 128, "max_num_seqs": 4}
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


@at_all
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("name", EMBEDDERS)
def test_embeddings_equal_transformers(name: str, depth: int, place: Place) -> None:
    tiny = EMBEDDERS[name]
    core = start(pooling_folder(name), place, task="embed", depth=depth)
    expected = [pooled(hidden, tiny.mode) for hidden in hidden_states(name)]
    if tiny.normalize:
        expected = [normalized(vector) for vector in expected]
    assert_close(run_pooling(core, pooling_requests(EMBED)), expected)


@at_all
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classes_equal_transformers(name: str, place: Place) -> None:
    core = start(pooling_folder(name), place)
    expected = logits(name)
    raw = PoolingParams("classify", activation=False)
    assert_close(run_pooling(core, pooling_requests(raw, name)), expected)
    over = torch.sigmoid if CLASSIFIERS[name].activation == "sigmoid" else lambda each: each.softmax(-1)
    assert_close(run_pooling(core, pooling_requests(PoolingParams("classify"), name)), [over(one) for one in expected])
    assert core.ready.labels == list(make_pooling_model(name).config.id2label.values())
    assert core.ready.tasks == ["classify", "score"][: 1 + (len(core.ready.labels) == 1)]


@pytest.mark.proof
@pytest.mark.parametrize("name", ["bert", "modernbert", "mpnet", "qwen3"])
@pytest.mark.parametrize("place", [interpreted])
def test_embeddings_equal_transformers_by_the_gpus_kernels(name: str, place: Place) -> None:
    """Of the short texts alone, since the interpreter is slow."""
    short = [number for number, text in enumerate(texts()) if len(text) <= 40]
    requests = [
        EngineRequest(at, texts()[number], [], SamplingParams(0), pooling=EMBED) for at, number in enumerate(short)
    ]
    tiny, hidden = EMBEDDERS[name], hidden_states(name)
    expected = [pooled(hidden[number], tiny.mode) for number in short]
    core = start(pooling_folder(name), place, task="embed", max_model_len=48)
    assert_close(run_pooling(core, requests), [normalized(one) for one in expected] if tiny.normalize else expected)
