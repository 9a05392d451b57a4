"""A family's config.json in its older forms means the same, and one that cannot run is refused."""

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from workers.engine.layers.query_temperature import QueryTemperature
from workers.engine.layers.rope_config import RopeConfig
from workers.engine.layers.rotary import inverse_frequencies
from workers.engine.messages.errors import ModelLoadError
from workers.engine.models import (
    cohere2,
    exaone4,
    gemma2,
    gemma3,
    gemma4,
    gpt_neox,
    hunyuan,
    ministral3,
    olmo3,
    phi3,
    smollm3,
)
from workers.engine.models.config import Json
from workers.engine.models.text_part import text_part

SHAPE: dict[str, Any] = {
    "architectures": ["SomeForCausalLM"],
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LINEAR = {"rope_type": "linear", "factor": 8.0}


def settings_of(rope: RopeConfig | None) -> tuple[object, ...] | None:
    return None if rope is None else (rope.theta, rope.kind, rope.longest)


def test_gemma3_as_transformers_4_and_5_save_it() -> None:
    older: Json = SHAPE | {"rope_scaling": LINEAR, "rope_local_base_freq": 5e3, "sliding_window_pattern": 2}
    newer: Json = SHAPE | {
        "rope_parameters": {
            "full_attention": LINEAR | {"rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
        },
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    first, second = gemma3.config(older), gemma3.config(newer)
    assert [settings_of(rope) for rope in first.ropes] == [settings_of(rope) for rope in second.ropes]
    assert replace(first, ropes=()) == replace(second, ropes=())
    assert first.max_model_len == 131072  # of which the factor is a part
    assert [layer.pattern.window for layer in first.layers] == [4096, None, 4096, None]


@pytest.mark.parametrize("rope", [{"rope_type": "yarn", "factor": 8.0}, {"full_attention": "yarn"}])
def test_rope_parameters_of_no_type_of_layer_are_refused(rope: dict[str, Any]) -> None:
    for family in (gemma3, gemma4, olmo3):
        with pytest.raises(ModelLoadError, match="give sliding_attention and full_attention an object each"):
            family.config(SHAPE | {"rope_parameters": rope})
    assert [settings_of(rope) for rope in olmo3.config(SHAPE | {"rope_scaling": LINEAR}).ropes] == [
        (5e5, "default", 2048),
        (5e5, "linear", 16384),
    ]


def test_layers_without_a_window_have_no_positions() -> None:
    for config in (cohere2.config(SHAPE), exaone4.config(SHAPE | {"sliding_window_pattern": "LLLG"})):
        assert [layer.pattern.window for layer in config.layers] == [4096, 4096, 4096, None]
        assert [config.ropes[config.rotation(layer)] is None for layer in range(4)] == [False, False, False, True]


@pytest.mark.parametrize("family", [cohere2, exaone4, gemma3])
def test_a_pattern_is_read_only_without_types_of_layers(family: ModuleType) -> None:
    raw = SHAPE | {"sliding_window_pattern": None}
    config = family.config(raw | {"layer_types": ["sliding_attention", "full_attention"] * 2})
    assert [layer.pattern.window for layer in config.layers] == [4096, None, 4096, None]
    with pytest.raises(ModelLoadError, match=r"no usable 'sliding_window_pattern' \(found None\)"):
        family.config(raw)


def test_older_names_of_longrope() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    for name in ("su", "yarn", "longrope"):
        rope = phi3.config(SHAPE | {"rope_scaling": {"type": name, **factors}}).ropes[0]
        assert rope is not None
        assert (rope.kind, rope.unscaled_length) == ("longrope", 4096)


def test_ministral3_as_transformers_4_and_5_save_it() -> None:
    rope = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "llama_4_scaling_beta": 0.2}
    for name in ("rope_scaling", "rope_parameters"):
        assert ministral3.config(SHAPE | {name: rope}).query_temperature == QueryTemperature(0.2, 512)
        for part, value in (("llama_4_scaling_beta", None), ("original_max_position_embeddings", 0)):
            with pytest.raises(ModelLoadError, match=rf"no usable '{part}' .*found {value}"):
                ministral3.config(SHAPE | {name: rope | {part: value}})
    assert ministral3.config(SHAPE | {"rope_parameters": None}).query_temperature == QueryTemperature(0.1, 16384)


def test_older_names_of_partial_rotation() -> None:
    older = gpt_neox.config(SHAPE | {"rotary_pct": 0.5, "rotary_emb_base": 5e3})
    newer = gpt_neox.config(SHAPE | {"rope_parameters": {"rope_theta": 5e3, "partial_rotary_factor": 0.5}})
    assert [
        (settings_of(config.ropes[0]), config.ropes[0].rotated(16)) for config in (older, newer) if config.ropes[0]
    ] == [((5e3, "default", 2048), 8)] * 2


def test_a_dynamic_rotation_with_alpha_does_not_depend_on_lengths() -> None:
    rope = hunyuan.config(SHAPE | {"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}}).ropes[0]
    assert rope is not None
    assert (rope.kind, rope.theta) == ("default", pytest.approx(1e4 * 1000 ** (16 / 14)))


def test_a_list_of_another_length_is_refused() -> None:
    rope = phi3.config(SHAPE | {"rope_scaling": {"type": "su", "short_factor": [1.0] * 7, "long_factor": [1.0]}}).ropes[
        0
    ]
    assert rope is not None
    with pytest.raises(ModelLoadError, match="a short_factor of 7 numbers for RoPE, but a head has 8 rotated pairs"):
        inverse_frequencies(rope, 16, 0)
    with pytest.raises(ModelLoadError, match="no_rope_layers for 3 layers, but num_hidden_layers is 4"):
        smollm3.config(SHAPE | {"no_rope_layers": [1, 1, 0]})


def test_gemma2_to_both_sides_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="use_bidirectional_attention, which SomeForCausalLM supports only by"):
        gemma2.config(SHAPE | {"use_bidirectional_attention": True})


def test_what_the_whole_says_goes_before_what_its_text_says() -> None:
    whole = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "text_config": {"model_type": "qwen2_5_vl_text", "tie_word_embeddings": False, "rms_norm_eps": 1e-6},
        "tie_word_embeddings": True,
        "quantization_config": {"quant_method": "awq"},
    }
    text = text_part(whole)
    assert text["architectures"] == ["Qwen2ForCausalLM"]
    assert (text["tie_word_embeddings"], text["rms_norm_eps"], text["num_key_value_heads"]) == (True, 1e-6, 8)
    assert text["quantization_config"] == {"quant_method": "awq"}


def test_a_model_of_text_alone_stays_as_it_is() -> None:
    for name in ("LlamaForCausalLM", "T5ForConditionalGeneration"):
        raw = SHAPE | {"architectures": [name], "model_type": "t5"}
        assert text_part(raw) is raw
