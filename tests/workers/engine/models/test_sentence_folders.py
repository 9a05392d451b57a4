"""Folders as sentence-transformers saves them, and what else decides how a model pools."""

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.workers.engine.models.tiny_models import folder
from tests.workers.engine.models.tiny_pooling_models import (
    hidden_states,
    model_moved,
    normalized,
    pooled,
    pooling_folder,
    save_modules,
    texts,
)
from tests.workers.engine.places import CPU
from tests.workers.engine.pooling import EMBED, assert_close, pooling_requests, run_pooling, start
from workers.engine.device.executor import Executor
from workers.engine.messages.config import EngineConfig
from workers.engine.messages.core import EngineRequest, Finish, PoolingParams, SamplingParams
from workers.engine.messages.errors import ModelLoadError

CLS = {"word_embedding_dimension": 64, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}


def sentence_folder(
    path: Path, pooling: dict[str, Any], dense: torch.nn.Linear | None = None, normalize: bool = False, **config: Any
) -> Path:
    """A folder of sentence-transformers around the tiny BERT, with more in its config.json."""
    save_modules(with_config("bert", path, **config), pooling, dense, normalize)
    return path


@pytest.mark.parametrize("settings", [CLS, {"pooling_mode": "cls"}])
def test_modules_of_a_folder_are_applied_in_order(settings: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(1)
    dense = torch.nn.Linear(64, 24)
    core = start(sentence_folder(tmp_path / "model", settings, dense, normalize=True), CPU)
    with torch.inference_mode():
        expected = [normalized(torch.tanh(dense(pooled(hidden, "cls")))) for hidden in hidden_states("bert")]
    assert_close(run_pooling(core, pooling_requests(EMBED)), expected)
    assert (core.ready.tasks, core.ready.embedding_size, core.ready.matryoshka) == (["embed"], 24, [24])


def test_the_model_may_lie_in_a_folder_of_its_own(tmp_path: Path) -> None:
    path = model_moved(sentence_folder(tmp_path / "model", CLS))
    core = start(path, CPU)
    assert_close(run_pooling(core, pooling_requests(EMBED)), [pooled(one, "cls") for one in hidden_states("bert")])
    (path / "0_Transformer" / "config.json").rename(path / "config.json")
    where = f"{path / 'modules.json'} has the model itself in 0_Transformer, where no config.json is"
    assert refused(path) == where
    (path / "config.json").unlink()
    assert refused(path) == f"the model folder {path} has no config.json"


@pytest.mark.parametrize("modules", ["{}", "[]", "no JSON", '[{"path": null}]', '[{"path": "0_Missing"}]'])
def test_a_model_that_generates_needs_no_modules(modules: str, tmp_path: Path) -> None:
    path = copytree(folder("llama"), tmp_path / "model")
    (path / "modules.json").write_text(modules)
    assert start(path, CPU, task="generate").ready.tasks == ["generate"]


@pytest.mark.parametrize("mode", ["weightedmean", "lasttoken", "mean_sqrt_len_tokens"])
def test_other_ways_of_pooling_equal_sentence_transformers(mode: str, tmp_path: Path) -> None:
    core = start(sentence_folder(tmp_path / "model", {"pooling_mode": mode}), CPU)
    name = {"lasttoken": "last", "mean_sqrt_len_tokens": "mean_sqrt_len"}.get(mode, mode)
    assert_close(run_pooling(core, pooling_requests(EMBED)), [pooled(one, name) for one in hidden_states("bert")])


def test_ways_of_pooling_lie_side_by_side(tmp_path: Path) -> None:
    """In the order of sentence-transformers; the mean is among them unless the file says no."""
    flags = ("cls_token", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    core = start(sentence_folder(tmp_path / "model", {f"pooling_mode_{flag}": True for flag in flags}), CPU)
    modes = ("cls", "max", "mean", "mean_sqrt_len", "weightedmean", "last")
    expected = [torch.cat([pooled(hidden, mode) for mode in modes]) for hidden in hidden_states("bert")]
    assert_close(run_pooling(core, pooling_requests(EMBED)), expected)
    assert core.ready.embedding_size == 6 * 64


def test_tokens_of_a_prompt_are_left_out_of_the_pooling(tmp_path: Path) -> None:
    """At least the last token is pooled, and "cls" is the first one. Weights count from the text's
    beginning.
    """
    flags = {"pooling_mode_max_tokens": True, "pooling_mode_weightedmean_tokens": True, "include_prompt": False}
    core = start(sentence_folder(tmp_path / "model", CLS | flags), CPU, max_num_batched_tokens=512)
    left_out = [min(number, len(text) - 1) for number, text in enumerate(texts())]
    requests = [
        EngineRequest(number, text, [], SamplingParams(0), pooling=PoolingParams("embed", unpooled=number))
        for number, text in enumerate(texts())
    ]
    expected = []
    for hidden, before in zip(hidden_states("bert"), left_out, strict=True):
        places = torch.arange(1, len(hidden) + 1)[before:, None]
        mean = (hidden[before:] * places).sum(0) / places.sum()
        expected.append(torch.cat([hidden[0], hidden[before:].max(0).values, mean]))
    assert_close(run_pooling(core, requests), expected)


def test_requests_of_one_step_may_ask_for_different_things(tmp_path: Path) -> None:
    core = start(sentence_folder(tmp_path / "model", CLS, is_matryoshka=True), CPU, max_num_batched_tokens=512)
    hidden = hidden_states("bert")
    asked = [
        (PoolingParams("embed", dimensions=8), lambda one: one[0, :8]),
        (PoolingParams("embed", normalize=True), lambda one: normalized(one[0])),
        (PoolingParams("embed", dimensions=8, normalize=True), lambda one: normalized(one[0, :8])),
        (PoolingParams("token_embed"), lambda one: one),
        (PoolingParams("token_embed", dimensions=16, normalize=True), lambda one: normalized(one[:, :16])),
    ]
    requests = [
        EngineRequest(number, text, [], SamplingParams(0), pooling=asked[number % len(asked)][0])
        for number, text in enumerate(texts())
    ]
    expected = [asked[number % len(asked)][1](one) for number, one in enumerate(hidden)]
    assert_close(run_pooling(core, requests), expected)
    assert (core.ready.tasks, core.ready.embedding_size) == (["embed", "token_embed"], 64)
    assert core.ready.matryoshka == []


def test_names_of_old_checkpoints_are_read(tmp_path: Path) -> None:
    path = tmp_path / "model"
    copytree(pooling_folder("bert"), path)
    tensors = load_file(path / "model.safetensors")
    old = {
        "bert." + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): each
        for name, each in tensors.items()
    }
    old["bert.embeddings.position_ids"] = torch.arange(200)
    save_file(old, path / "model.safetensors")
    expected = [pooled(hidden, "mean") for hidden in hidden_states("bert")]
    assert_close(run_pooling(start(path, CPU), pooling_requests(EMBED)), expected)


def test_sizes_of_matryoshka_are_published(tmp_path: Path) -> None:
    core = start(sentence_folder(tmp_path / "model", CLS, matryoshka_dimensions=[32, 16]), CPU)
    assert core.ready.matryoshka == [16, 32, 64]


def test_a_text_of_the_whole_context_fits_and_a_longer_one_is_refused() -> None:
    core = start(pooling_folder("bert"), CPU, max_num_batched_tokens=16)
    assert core.ready.max_num_batched_tokens == core.ready.max_model_len == 200
    core.add(
        [EngineRequest(length, [5] * length, [], SamplingParams(0), pooling=EMBED) for length in (200, 201)]
        + [EngineRequest(1, [5], [], SamplingParams(4)), EngineRequest(2, [], [], SamplingParams(0), pooling=EMBED)]
    )
    ended: dict[int, tuple[Finish, str]] = {}
    while core.busy:
        output = core.step()
        assert output is not None
        for number, finish in zip(output.request_ids, output.finish, strict=True):
            ended[number] = Finish(finish), output.errors.get(number, "")
    assert ended == {
        200: (Finish.STOP, ""),
        201: (Finish.ERROR, "the text has 201 tokens, and the model takes 200"),
        1: (Finish.ERROR, "the model's tasks are embed, token_embed, and the request is for 'generate'"),
        2: (Finish.ERROR, "the prompt has no tokens"),
    }


def test_bfloat16_is_close() -> None:
    core = start(pooling_folder("modernbert-classes"), CPU, dtype="bfloat16")
    rough = run_pooling(core, pooling_requests(PoolingParams("classify", activation=False)))
    exact = run_pooling(
        start(pooling_folder("modernbert-classes"), CPU), pooling_requests(PoolingParams("classify", activation=False))
    )
    for one, other in zip(rough, exact, strict=True):
        assert torch.cosine_similarity(one, other, dim=0) > 0.99


def refused(path: Path, **settings: Any) -> str:
    with pytest.raises(ModelLoadError) as error:
        Executor(EngineConfig(model=str(path), threads=1, device="cpu", **settings))
    return str(error.value)


def test_a_folder_that_the_engine_cannot_follow_is_refused_in_a_sentence(tmp_path: Path) -> None:
    path = sentence_folder(tmp_path / "unknown", CLS)
    modules = json.loads((path / "modules.json").read_text())
    modules[1]["type"] = "sentence_transformers.models.WordWeights"
    (path / "modules.json").write_text(json.dumps(modules))
    assert "lists the modules Transformer, WordWeights" in refused(path)
    modules[1]["type"] = "my_pooling.Pooling"
    (path / "modules.json").write_text(json.dumps(modules))
    assert "names the module 'my_pooling.Pooling'; code from elsewhere" in refused(path)
    (path / "modules.json").write_text("{}")
    assert "modules.json holds no list" in refused(path)
    path = sentence_folder(tmp_path / "missing", CLS)
    (path / "1_Pooling" / "config.json").unlink()
    assert refused(path) == f"{path / '1_Pooling' / 'config.json'} does not exist"
    path = sentence_folder(tmp_path / "other", {"pooling_mode": "median"})
    assert "asks for the pooling median; supported are cls, max, mean, mean_sqrt_len, weightedmean" in refused(path)
    path = sentence_folder(tmp_path / "dense", CLS, torch.nn.Linear(32, 8))
    assert "projects 32 numbers, but pooling returns 64" in refused(path)
    (path / "2_Dense" / "config.json").write_text('{"in_features": 64, "out_features": 8}')
    assert "has shape [8, 32], but config.json implies [8, 64]" in refused(path)


def with_config(name: str, path: Path, **config: Any) -> Path:
    """A copy of a tiny model's folder with more in its config.json."""
    copytree(pooling_folder(name), path)
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | config))
    return path


def test_positions_need_the_token_of_padding_where_they_begin_behind_it(tmp_path: Path) -> None:
    path = with_config("roberta", tmp_path / "roberta", pad_token_id=None)
    assert "config.json has the pad_token_id None, behind which RoBERTa's positions begin; set" in refused(path)
    path = with_config("mpnet", tmp_path / "mpnet", pad_token_id=None)
    expected = [pooled(hidden, "mean") for hidden in hidden_states("mpnet")]
    assert_close(run_pooling(start(path, CPU), pooling_requests(EMBED)), expected)


def test_types_are_ignored_by_a_model_with_a_single_one() -> None:
    core = start(pooling_folder("roberta"), CPU)
    requests = [
        EngineRequest(number, text, [], SamplingParams(0), pooling=EMBED, second_text=len(text) // 2)
        for number, text in enumerate(texts())
    ]
    assert_close(run_pooling(core, requests), [pooled(hidden, "mean") for hidden in hidden_states("roberta")])


def test_an_encoder_needs_no_pooler_for_embeddings(tmp_path: Path) -> None:
    path = with_config("bert", tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("pooler.")}
    assert len(kept) < len(tensors)
    save_file(kept, path / "model.safetensors")
    expected = [pooled(hidden, "mean") for hidden in hidden_states("bert")]
    assert_close(run_pooling(start(path, CPU), pooling_requests(EMBED)), expected)


def test_a_task_that_the_model_is_not_for_is_refused_in_a_sentence() -> None:
    assert "--task classify needs a classification head, and BertModel has none" in refused(
        pooling_folder("bert"), task="classify"
    )
    assert "--task score needs a model with one label" in refused(pooling_folder("bert-classes"), task="score")
    assert "BertModel is an encoder" in refused(pooling_folder("bert"), task="generate")
    assert "this one pools; use 1" in refused(pooling_folder("bert"), tensor_parallel_size=2)
    assert "--task classify needs" in refused(folder("llama"), task="classify")
