"""Architectures that run by transformers' own classes on the paged cache: the same greedy tokens as
`generate`, and what is refused.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3nTextConfig

from tests.workers.engine import driving
from tests.workers.engine.loading import load_model
from tests.workers.engine.models.tiny_models import MODELS, NEW_TOKENS, OTHERS, TinyModel, folder, make, reference
from tests.workers.engine.places import Place, at, interpreted
from workers.engine.checkpoint.model_checkpoint import open_checkpoint
from workers.engine.cuda.graphs import Work
from workers.engine.device.executor import Executor
from workers.engine.messages.config import EngineConfig
from workers.engine.messages.core import EngineRequest, SamplingParams
from workers.engine.messages.errors import ModelLoadError
from workers.engine.models.config import ModelConfig
from workers.engine.models.registry import Family
from workers.engine.models.transformers_attention import ALL_BEFORE, OTHER, describe_mask
from workers.engine.models.transformers_model import TransformersClass, TransformersModel
from workers.engine.models.transformers_parity import check_parity, replays

CPU = torch.device("cpu")
NAMES = [pytest.param(name, marks=() if name in ("cwm", "gpt-oss") else pytest.mark.proof) for name in OTHERS]
# The context of rope-dynamic ends where its rotation begins to grow; the class refuses the others
_OWN_CODE_ONLY = ("gemma4", "nemotron", "rope-dynamic", "stablelm")
BY_EITHER = [name for name in MODELS if not name.startswith(_OWN_CODE_ONLY)]
_SHAPE: dict[str, Any] = OTHERS["olmoe"].settings


def windows_of(config: ModelConfig) -> list[int | None]:
    return [layer.pattern.window for layer in config.layers]


def requests(name: str, first_id: int = 0) -> list[EngineRequest]:
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0)
    return [EngineRequest(first_id + i, prompt, [], sampling) for i, prompt in enumerate(reference(name).prompts)]


@pytest.mark.parametrize("name", NAMES)
def test_reference_is_telling(name: str) -> None:
    expected = reference(name)
    for tokens, logits in zip(expected.tokens, expected.logits, strict=True):
        assert len(set(tokens)) >= 20
        first, second = logits.topk(2).values.unbind(-1)
        assert (first - second).min() > 5e-4


@at
@pytest.mark.parametrize(("depth", "budget"), [pytest.param(0, 2048, marks=pytest.mark.proof), (1, 40)])
@pytest.mark.parametrize("name", NAMES)
def test_same_tokens_as_generate(name: str, depth: int, budget: int, place: Place) -> None:
    """At once and in chunks, and again with what the prefix cache holds."""
    expected = reference(name)
    core = driving.make_core(name, place=place, depth=depth, max_num_seqs=8, max_num_batched_tokens=budget)
    first = driving.run(core, requests(name))
    assert [answer.tokens for answer in first.answers.values()] == expected.tokens
    second = driving.run(core, requests(name, first_id=100))
    assert [answer.tokens for answer in second.answers.values()] == expected.tokens
    hits = sum((len(prompt) - 1) // 16 * 16 for prompt in expected.prompts)
    assert second.prefix_hit_tokens - first.prefix_hit_tokens == hits


@pytest.mark.parametrize("place", [interpreted])
def test_same_tokens_by_the_kernels(place: Place) -> None:
    expected = reference("cwm")
    sampling = SamplingParams(max_tokens=2, temperature=0.0)
    core = driving.make_core("cwm", place=place, depth=1, max_num_seqs=4, max_num_batched_tokens=24)
    run = driving.run(core, [EngineRequest(i, expected.prompts[i], [], sampling) for i in (2, 5)])
    assert [answer.tokens for answer in run.answers.values()] == [expected.tokens[i][:2] for i in (2, 5)]


@pytest.mark.usefixtures("crowded")
@pytest.mark.proof
def test_preempted_requests_say_the_same() -> None:
    expected = reference("cwm")
    core = driving.make_core("cwm", num_blocks=20, depth=1, max_num_seqs=8, max_model_len=224)
    run = driving.run(core, requests("cwm"))
    assert [answer.tokens for answer in run.answers.values()] == expected.tokens
    assert run.preemptions > 0


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "mistral" else pytest.mark.proof) for name in BY_EITHER]
)
def test_an_architecture_with_code_of_our_own_runs_by_transformers_where_asked(name: str) -> None:
    expected = reference(name)
    assert isinstance(open_checkpoint(str(folder(name))).family, Family)
    assert isinstance(open_checkpoint(str(folder(name)), "transformers").family, TransformersClass)
    core = driving.make_core(name, model_impl="transformers", max_num_seqs=8)
    run = driving.run(core, requests(name))
    assert [answer.tokens for answer in run.answers.values()] == expected.tokens


def test_what_the_class_says_of_itself() -> None:
    config = open_checkpoint(str(folder("cwm"))).config
    assert [(each.heads, each.kv_heads, each.head_dim, each.scale) for each in config.layers] == [(4, 2, 16, 0.25)] * 3
    assert windows_of(config) == [24, None, 24]
    assert (config.vocab_size, config.max_model_len) == (160, 256)
    longrope = open_checkpoint(str(folder("granite-longrope")), "transformers").config
    assert [each.scale for each in longrope.layers] == [0.1] * 3
    assert longrope.prefix_cacheable(64)
    assert not longrope.prefix_cacheable(65)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", NAMES)
def test_half_precision_passes_the_check_at_load(name: str, dtype: str) -> None:
    assert load_model(str(folder(name)), dtype, CPU).dtype == getattr(torch, dtype)


def test_weights_are_our_own_copy() -> None:
    """A file that is replaced under a memory map would kill the process."""
    model = load_model(str(folder("cwm")), "float32", CPU)
    assert isinstance(model, TransformersModel)
    assert str(folder("cwm")) not in Path("/proc/self/maps").read_text()


def test_end_tokens_come_from_the_checkpoint(tmp_path: Path) -> None:
    path = Path(shutil.copytree(folder("cwm"), tmp_path / "model"))
    (path / "generation_config.json").write_text('{"eos_token_id": [5, 9]}')
    assert load_model(str(path), "float32", CPU).config.eos_token_ids == (5, 9)


def refusal(path: Path, impl: str = "auto") -> str:
    with pytest.raises(ModelLoadError) as caught:
        Executor(
            EngineConfig(model=str(path), dtype="float32", device="cpu", threads=1, model_impl=impl, max_num_seqs=2)
        )
    message = str(caught.value)
    assert "\n" not in message
    return message


def saved(tmp_path: Path, config_class: str, **settings: Any) -> Path:
    make(TinyModel(1, 0.2, config_class, _SHAPE | settings)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("config_class", "settings", "why"),
    [
        (
            "DeepseekV3Config",
            {"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "num_key_value_heads": 4}
            | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 3},
            "DeepseekV3ForCausalLM cannot run on this engine: layer 0 asks for keys of 32 and values of 16 numbers a"
            " head",
        ),
        (
            "MambaConfig",
            {"num_hidden_layers": 1},
            "MambaForCausalLM cannot run on this engine: it keeps a state beside",
        ),
        (
            "BioGptConfig",
            {},
            "BioGptForCausalLM cannot run on this engine: transformers' class does not take attention functions",
        ),
        (
            "Lfm2Config",
            {"layer_types": ["conv", "full_attention", "conv"]},
            "Lfm2ForCausalLM cannot run on this engine: 1 of its 3 layers attend",
        ),
    ],
)
def test_what_the_engine_cannot_do_is_refused_before_any_weight_is_read(
    tmp_path: Path, config_class: str, settings: dict[str, Any], why: str
) -> None:
    path = saved(tmp_path, config_class, **settings)
    (path / "model.safetensors").unlink()
    message = refusal(path)
    assert why in message
    assert message.startswith("the engine has no code of its own for ")


def test_a_class_without_keywords_for_its_attention_is_refused(tmp_path: Path) -> None:
    message = refusal(saved(tmp_path, "NemotronConfig"), impl="transformers")
    assert "its layers do not pass keywords on to their attention" in message


def test_own_code_only(tmp_path: Path) -> None:
    message = refusal(folder("cwm"), impl="own")
    assert message.startswith(
        "config.json names the architecture 'CwmForCausalLM', and the engine has its own code for GPT2"
    )


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, "BartConfig", decoder_layers=1, encoder_layers=1, d_model=64)
    assert "transformers' BartForCausalLM cannot run on this engine" in refusal(path)


def edit_config(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture
def cwm(tmp_path: Path) -> Path:
    """A folder that the test may change."""
    return Path(shutil.copytree(folder("cwm"), tmp_path / "cwm"))


def test_an_unknown_architecture_is_refused(cwm: Path) -> None:
    edit_config(cwm, architectures=["NobodysForCausalLM"])
    assert "has no causal language model of that name" in refusal(cwm)


def test_sizes_by_layer_are_no_fault(tmp_path: Path) -> None:
    """Gemma 3n has a list of them."""
    Gemma3nTextConfig(
        architectures=["Gemma3nForCausalLM"],
        **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 128),
        **dict.fromkeys(("hidden_size_per_layer_input", "head_dim"), 8),
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        laurel_rank=4,
        num_hidden_layers=5,
        num_kv_shared_layers=0,
        intermediate_size=[64] * 5,
        activation_sparsity_pattern=[0.0] * 5,
        max_position_embeddings=64,
    ).save_pretrained(tmp_path)
    assert len(open_checkpoint(str(tmp_path)).config.layers) == 5


def test_code_in_the_checkpoint_is_never_run(cwm: Path) -> None:
    (cwm / "configuration_evil.py").write_text("raise SystemExit('it ran')")
    edit_config(cwm, model_type="evil", auto_map={"AutoConfig": "configuration_evil.EvilConfig"})
    assert "it needs the code in its own repository, which is never run" in refusal(cwm)


def test_pickled_weights_are_never_read(cwm: Path) -> None:
    (cwm / "model.safetensors").rename(cwm / "pytorch_model.bin")
    assert "holds pickled weights only, which are never read" in refusal(cwm)


def test_a_missing_tensor_is_refused(cwm: Path) -> None:
    weights = load_file(cwm / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, cwm / "model.safetensors", metadata={"format": "pt"})
    assert "has no tensor 'model.layers.1.mlp.up_proj.weight'" in refusal(cwm)


@pytest.mark.parametrize("damage", [lambda whole: whole[: len(whole) // 2], lambda whole: b""])
def test_a_torn_file_is_refused(cwm: Path, damage: Callable[[bytes], bytes]) -> None:
    file = cwm / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    assert "cannot be read as" in refusal(cwm)


def test_a_shape_that_does_not_fit_is_refused(cwm: Path) -> None:
    edit_config(cwm, intermediate_size=100)
    assert (
        "tensor 'model.layers.0.mlp.down_proj.weight' has shape [64, 96], but config.json implies [64, 100]"
        in refusal(cwm)
    )


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_key_value_heads": 3}, "it has 4 attention heads, which 3 key-value heads do not divide"),
        ({"num_hidden_layers": "three"}, "cannot read"),
        ({"hidden_act": "snake"}, "CwmForCausalLM cannot be built as config.json says"),
    ],
)
def test_a_configuration_that_makes_no_model_is_refused(cwm: Path, changes: dict[str, Any], why: str) -> None:
    edit_config(cwm, **changes)
    assert why in refusal(cwm)


def test_windows_are_those_of_the_masks(tmp_path: Path) -> None:
    """This class names no window to its attention functions."""
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    path = saved(tmp_path, "Qwen2MoeConfig", use_sliding_window=True, sliding_window=5, layer_types=kinds)
    assert windows_of(open_checkpoint(str(path)).config) == [None, None, None]
    assert windows_of(load_model(str(path), "float32", CPU).config) == [None, 5, 5]


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (lambda q, kv: kv <= q, ALL_BEFORE),
        (lambda q, kv: (kv <= q) & (kv > q - 7), 7),
        (lambda q, kv: (kv <= q) & (kv // 8 == q // 8), OTHER),
        (lambda q, kv: (kv <= q) & ((kv < 4) | (kv > q - 7)), OTHER),
        (lambda q, kv: kv <= q + 1, OTHER),
    ],
)
def test_what_a_mask_lets_a_query_see(visible: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], seen: int) -> None:
    mask = describe_mask(
        mask_function=lambda batch, head, q, kv: visible(q, kv), config=SimpleNamespace(max_position_embeddings=64)
    )
    assert mask.tolist() == [[[[seen]]]]


def test_other_logits_than_the_class_gives_are_refused() -> None:
    model = load_model(str(folder("cwm")), "float32", CPU)
    assert isinstance(model, TransformersModel)
    check_parity(model, model.dtype)
    layers = model.config.layers
    model.config = replace(model.config, layers=(*layers[:2], replace(layers[2], scale=0.11)))
    with pytest.raises(
        ModelLoadError,
        match=r"cannot run on this engine: its logits on a paged cache differ from its own by 0\.\d+ of their size",
    ):
        check_parity(model, model.dtype)


def test_a_recording_counts_only_where_it_repeats_for_other_tokens() -> None:
    model = load_model(str(folder("cwm")), "float32", CPU)
    assert isinstance(model, TransformersModel)

    def faithful(work: Work) -> Work:
        work()
        return work

    def stale(work: Work) -> Work:
        work()
        return lambda: None

    def failing(work: Work) -> Work:
        raise RuntimeError("operation not permitted when stream is capturing")

    assert [replays(model, record) for record in (faithful, stale, failing)] == [True, False, False]
