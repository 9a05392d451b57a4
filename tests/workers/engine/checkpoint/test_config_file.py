"""A config.json that cannot run is refused in one sentence, before anything is started."""

import json
from pathlib import Path
from typing import Any

import pytest

from workers.engine.checkpoint.config_file import check_config_file
from workers.engine.messages.errors import ModelLoadError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
}
WINDOWED: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": True}


def check(folder: Path, changes: dict[str, Any], model_impl: str = "auto", ranks: int = 1) -> None:
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    check_config_file(folder, model_impl, "auto", ranks)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_hidden_layers": "three"}, "has no usable 'num_hidden_layers' (found 'three')"),
        ({"intermediate_size": [96] * 3}, "has no usable 'intermediate_size' (found [96, 96, 96])"),
        ({"num_key_value_heads": 5}, "has 12 attention heads, which 5 key-value heads do not divide"),
        (WINDOWED | {"sliding_window": 0}, "has no usable 'sliding_window' (found 0)"),
        ({"architectures": ["GPT2LMHeadModel"], "n_head": "12"}, "has no usable 'n_head' (found '12')"),
        (WINDOWED | {"layer_types": 3}, "has no usable 'layer_types' (found 3); it must be a list"),
        (WINDOWED | {"layer_types": ["full_attention"]}, "layer_types for 1 layers, but num_hidden_layers is 3"),
        (WINDOWED | {"layer_types": ["full_attention", "mamba", "mamba"]}, "has a layer of type 'mamba'"),
        ({"architectures": []}, "names no architecture"),
    ],
)
def test_a_config_of_which_no_model_can_be_made_is_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        check(tmp_path, changes)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "model_type", "why"),
    [
        ("NobodysForCausalLM", "nobodys", r"transformers \S+ has no causal language model of that name"),
        ("MambaForCausalLM", "mamba", "it keeps a state beside its keys and values"),
        ("GPTNeoForCausalLM", "gpt_neo", "transformers' class does not take attention functions from outside"),
    ],
)
def test_the_source_of_a_class_says_why_it_cannot_run(tmp_path: Path, name: str, model_type: str, why: str) -> None:
    with pytest.raises(
        ModelLoadError, match=f", and transformers' {name} cannot run on this engine: {why}; it has for "
    ):
        check(tmp_path, {"architectures": [name], "model_type": model_type})


def test_ranks_that_cannot_share_the_heads_are_refused(tmp_path: Path) -> None:
    check(tmp_path, {}, ranks=4)
    with pytest.raises(ModelLoadError, match=r"^8 ranks cannot share the model's 12 attention heads and 4 key-value"):
        check(tmp_path, {}, ranks=8)


@pytest.mark.parametrize(
    ("changes", "model_impl"),
    [
        ({}, "auto"),
        ({"architectures": ["OlmoeForCausalLM"], "model_type": "olmoe"}, "auto"),
        (WINDOWED | {"use_sliding_window": False, "sliding_window": 0}, "auto"),
        (WINDOWED | {"layer_types": ["mamba"]}, "transformers"),
    ],
)
def test_other_configs_are_left_to_the_engine(tmp_path: Path, changes: dict[str, Any], model_impl: str) -> None:
    check(tmp_path, changes, model_impl)
