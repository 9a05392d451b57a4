"""Rotary tables against transformers' own rotary modules, for every kind of scaling and either way
of writing it down.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from workers.engine.layers.rotary import Rotary, rotate
from workers.engine.messages.errors import ModelLoadError
from workers.engine.models.config import rope_config

DIM = 16
FACTORS: dict[str, Any] = {
    "short_factor": [1.0 + i / 16 for i in range(8)],
    "long_factor": [2.0 + i / 4 for i in range(8)],
}
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-exact": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "truncate": False,
        "beta_fast": 16.0,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
    },
    "yarn-given": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.25,
    },
    "longrope": {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 64, **FACTORS},
}


def transformers_tables(
    parameters: dict[str, Any], positions: Tensor, max_position_embeddings: int
) -> tuple[Tensor, Tensor]:
    config = LlamaConfig(
        hidden_size=2 * DIM,
        num_attention_heads=2,
        max_position_embeddings=max_position_embeddings,
        rope_parameters={"rope_theta": 5e3} | parameters,
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    return cos[0], sin[0]


def ours(raw: dict[str, Any], length: int, max_position_embeddings: int) -> Rotary:
    return Rotary(rope_config(raw, max_position_embeddings), DIM, length, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("length", [40, 200])
@pytest.mark.parametrize("kind", KINDS)
def test_same_as_transformers(kind: str, length: int) -> None:
    """A prompt of `length` tokens; the longer one is past the length for which the model was first
    trained.
    """
    limit = 64 if kind == "dynamic" else 256
    positions = torch.arange(length)
    cos, sin = transformers_tables(KINDS[kind], positions, limit)
    rotary = ours({"rope_parameters": {"rope_theta": 5e3} | KINDS[kind]}, 256, limit)
    our_cos, our_sin = rotary.cos_sin(positions, torch.full_like(positions, length))
    torch.manual_seed(0)
    x = torch.randn(length, 3, DIM)
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos[None], sin[None])
    assert (rotate(x, our_cos, our_sin) - expected[0].transpose(0, 1)).abs().max() < 2e-5


@pytest.mark.parametrize("kind", KINDS)
def test_older_form_means_the_same(kind: str) -> None:
    older = {"rope_theta": 5e3}
    if kind != "default":
        older |= {
            "rope_scaling": {("type" if key == "rope_type" else key): value for key, value in KINDS[kind].items()}
        }  # type: ignore[dict-item]
    newer = {"rope_parameters": {"rope_theta": 5e3} | KINDS[kind]}
    positions = torch.arange(100)
    tables = [torch.stack(ours(raw, 256, 64).cos_sin(positions, positions + 1)) for raw in (older, newer)]
    assert torch.equal(*tables)


def test_base_defaults_to_ten_thousand() -> None:
    assert rope_config({}, 64).theta == 10_000.0


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"rope_scaling": {"rope_type": "spiral"}}, "RoPE scaling 'spiral'; supported are default, linear"),
        ({"rope_scaling": {"type": "linear"}}, "'linear' but does not set factor"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "does not set low_freq_factor, high_freq_factor"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor of 1.5; it must be above 0"),
    ],
)
def test_what_is_not_known_is_refused(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        rope_config(raw, 64)
