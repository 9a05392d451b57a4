"""Embeddings and classes equal transformers' classes and sentence-transformers' arithmetic, for
every family, through the real scheduler and runner: texts of very different lengths come together.
"""

import pytest
import torch

from tests.workers.engine.models.tiny_pooling_models import (
    CLASSIFIERS,
    EMBEDDERS,
    hidden_states,
    logits,
    make_pooling_model,
    make_wide_model,
    normalized,
    pooled,
    pooling_folder,
    states_of,
    texts,
    wide_folder,
)
from tests.workers.engine.places import Place, at_all, interpreted
from tests.workers.engine.pooling import EMBED, assert_close, pooling_requests, run_pooling, start
from workers.engine.messages.core import EngineRequest, PoolingParams, SamplingParams


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
@pytest.mark.parametrize("name", EMBEDDERS)
def test_embeddings_in_bfloat16_point_where_those_in_float32_do(name: str, place: Place) -> None:
    core = start(wide_folder(name), place, task="embed", dtype="bfloat16")
    expected = [pooled(hidden, EMBEDDERS[name].mode) for hidden in states_of(make_wide_model(name))]
    for found, exact in zip(run_pooling(core, pooling_requests(EMBED)), expected, strict=True):
        assert torch.cosine_similarity(found, exact, dim=0) >= 0.9995


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
