"""Implement ERNIE 4.5 (dense): Llama's shape with rotation in pairs side by side."""

from __future__ import annotations

from workers.engine.layers.weights import Weights
from workers.engine.models.config import Json, ModelConfig
from workers.engine.models.decoder import DecoderVariant, RotaryDecoder, decoder_config

_DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
}


def config(raw: Json) -> ModelConfig:
    return decoder_config({**_DEFAULTS, **raw}, max_position_embeddings=131072)


def build(raw: Json, config: ModelConfig, weights: Weights, max_model_len: int) -> RotaryDecoder:
    bias = bool(raw.get("use_bias", False))
    variant = DecoderVariant(qkv_bias=bias, output_bias=bias, mlp_bias=bias, interleaved=True)
    return RotaryDecoder(config, variant, weights, max_model_len)
