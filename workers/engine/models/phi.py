"""Implement Phi 1 and 2: attention and MLP in parallel after one layer norm, partial rotation, and
biases everywhere.
"""

from __future__ import annotations

from workers.engine.layers.weights import Weights
from workers.engine.models.config import Json, ModelConfig
from workers.engine.models.decoder import DecoderVariant, RotaryDecoder, TensorNames, decoder_config

_DEFAULTS = {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5}
_NAMES = TensorNames(
    norm="*.final_layernorm",
    output="self_attn.dense",
    query_norm="self_attn.q_layernorm",
    key_norm="self_attn.k_layernorm",
    up="mlp.fc1",
    down="mlp.fc2",
    mlp_norm=None,
)


def config(raw: Json) -> ModelConfig:
    return decoder_config({**_DEFAULTS, **raw}, max_position_embeddings=2048, norm_eps="layer_norm_eps")


def build(raw: Json, config: ModelConfig, weights: Weights, max_model_len: int) -> RotaryDecoder:
    variant = DecoderVariant(
        _NAMES,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        head_bias=True,
        head_norm=bool(raw.get("qk_layernorm", False)),
        layer_norm=True,
        gated=False,
        parallel=True,
    )
    return RotaryDecoder(config, variant, weights, max_model_len)
