"""Implement Nemotron 3 and 4, and Minitron: layer norms whose weights are stored minus 1, partial
rotation, and a MLP without gates, whose activation is ReLU squared.
"""

from __future__ import annotations

from workers.engine.layers.weights import Weights
from workers.engine.models.config import Json, ModelConfig
from workers.engine.models.decoder import DecoderVariant, RotaryDecoder, decoder_config

_DEFAULTS = {"hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5}


def config(raw: Json) -> ModelConfig:
    return decoder_config({**_DEFAULTS, **raw}, max_position_embeddings=4096, norm_eps="norm_eps")


def build(raw: Json, config: ModelConfig, weights: Weights, max_model_len: int) -> RotaryDecoder:
    bias = bool(raw.get("attention_bias", False))
    variant = DecoderVariant(
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        layer_norm=True,
        norm_offset=1.0,
        gated=False,
    )
    return RotaryDecoder(config, variant, weights, max_model_len)
