"""Models that pool and run by transformers' own classes: equal to the class on each text alone, and
what is refused.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.workers.engine.models.tiny_pooling_models import (
    PADDED,
    hidden_states,
    logits,
    make_pooling_model,
    make_wide_model,
    normalized,
    pooled,
    pooling_folder,
    states_of,
    wide_folder,
)
from tests.workers.engine.places import CPU
from tests.workers.engine.pooling import EMBED, assert_close, pooling_requests, run_pooling, start
from workers.engine.checkpoint.model_checkpoint import open_checkpoint
from workers.engine.device.executor import Executor
from workers.engine.messages.config import EngineConfig
from workers.engine.messages.core import PoolingParams
from workers.engine.messages.errors import ModelLoadError
from workers.engine.models.padded_model import PaddedClass
from workers.engine.models.registry import Family

_SHAPE = PADDED["albert"].settings


@pytest.mark.parametrize("name", ["electra", "albert", "deberta", "camembert", "cwm"])
def test_embeddings_equal_transformers(name: str) -> None:
    core = start(pooling_folder(name), CPU, task="embed" if name == "cwm" else "auto")
    expected = [pooled(hidden, PADDED[name].mode) for hidden in hidden_states(name)]
    if PADDED[name].normalize:
        expected = [normalized(vector) for vector in expected]
    assert_close(run_pooling(core, pooling_requests(EMBED)), expected)
    assert core.ready.max_model_len == (256 if name == "cwm" else 200)


@pytest.mark.parametrize("name", ["electra-pair", "deberta-classes"])
def test_classes_equal_transformers(name: str) -> None:
    core = start(pooling_folder(name), CPU)
    raw = PoolingParams("classify", activation=False)
    assert_close(run_pooling(core, pooling_requests(raw, name)), logits(name))
    assert core.ready.labels == list(make_pooling_model(name).config.id2label.values())


def test_each_tokens_states_equal_transformers() -> None:
    core = start(pooling_folder("electra"), CPU)
    assert_close(run_pooling(core, pooling_requests(PoolingParams("token_embed"))), hidden_states("electra"))


def test_an_encoder_with_code_of_our_own_runs_by_transformers_where_asked() -> None:
    path = pooling_folder("roberta")
    assert isinstance(open_checkpoint(str(path)).family, Family)
    assert isinstance(open_checkpoint(str(path), "transformers").family, PaddedClass)
    core = start(path, CPU, model_impl="transformers")
    assert_close(run_pooling(core, pooling_requests(EMBED)), [pooled(one, "mean") for one in hidden_states("roberta")])


@pytest.mark.parametrize("name", ["electra", "albert", "deberta"])
def test_embeddings_in_bfloat16_point_where_those_in_float32_do(name: str) -> None:
    found = run_pooling(start(wide_folder(name), CPU, dtype="bfloat16"), pooling_requests(EMBED))
    for vector, exact in zip(found, states_of(make_wide_model(name)), strict=True):
        assert torch.cosine_similarity(vector, pooled(exact, "mean"), dim=0) >= 0.9995


def refusal(path: Path, dtype: str = "float32", **settings: Any) -> str:
    with pytest.raises(ModelLoadError) as caught:
        Executor(EngineConfig(model=str(path), dtype=dtype, device="cpu", threads=1, **settings))
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("FNet", "FNetModel cannot run on this engine: its forward takes no attention_mask"),
        ("ConvBert", "ConvBertModel cannot run on this engine: a text's output in a batch differs"),
        ("IBert", "IBertModel cannot run on this engine: "),
        ("XLNet", "XLNetModel cannot run on this engine: its config.json has no usable 'max_position_embeddings'"),
    ],
)
def test_a_class_that_cannot_run_is_refused(name: str, why: str, tmp_path: Path) -> None:
    shape = _SHAPE if name != "XLNet" else {"d_model": 64, "n_head": 4, "d_inner": 96, "n_layer": 1}
    config = getattr(transformers, f"{name}Config")(**shape)
    getattr(transformers, f"{name}Model")(config).save_pretrained(tmp_path)
    assert why in refusal(tmp_path)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_class_that_padding_changes_is_refused_in_16_bits_too(dtype: str, tmp_path: Path) -> None:
    shape = {"hidden_size": 128, "intermediate_size": 512, "embedding_size": 64, "max_position_embeddings": 512}
    torch.manual_seed(0)
    model = transformers.ConvBertModel(transformers.ConvBertConfig(**_SHAPE | shape))
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() == 2:
                weights.normal_(0, weights.shape[1] ** -0.5)
    model.save_pretrained(tmp_path)
    assert "a text's output in a batch differs" in refusal(tmp_path, dtype)


def test_a_folder_that_asks_for_tuples_and_a_cache_gives_the_same(tmp_path: Path) -> None:
    make_pooling_model("cwm").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"return_dict": False, "use_cache": True}))
    core = start(tmp_path, CPU, task="embed")
    expected = [pooled(hidden, PADDED["cwm"].mode) for hidden in hidden_states("cwm")]
    assert_close(run_pooling(core, pooling_requests(EMBED)), [normalized(vector) for vector in expected])


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        ({"model_type": "new", "auto_map": {"AutoModel": "modeling.NewModel"}}, "it needs the code in its own"),
        ({"model_type": "bert"}, "has no class of that name"),
    ],
)
def test_code_from_outside_never_runs(raw: dict[str, Any], why: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NewModel"], **raw}))
    (tmp_path / "modeling.py").write_text("raise AssertionError('this ran')")
    assert why in refusal(tmp_path)


def test_our_own_code_alone_is_refused_where_there_is_none() -> None:
    assert "names the architecture 'ElectraForPreTraining', and the engine has its own code for Bert," in refusal(
        pooling_folder("electra"), model_impl="own"
    )
