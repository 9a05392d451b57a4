"""Implement Helium: Llama's shape with rotation in pairs side by side."""

from __future__ import annotations

from workers.engine.layers.weights import Weights
from workers.engine.models.config import Json, ModelConfig
from workers.engine.models.decoder import DecoderVariant, RotaryDecoder, decoder_config

_DEFAULTS = {"num_key_value_heads": 20, "head_dim": 128, "rms_norm_eps": 1e-8, "rope_theta": 100_000.0}


def config(raw: Json) -> ModelConfig:
    return decoder_config({**_DEFAULTS, **raw}, max_position_embeddings=4096)


def build(raw: Json, config: ModelConfig, weights: Weights, max_model_len: int) -> RotaryDecoder:
    bias, mlp_bias = bool(raw.get("attention_bias", False)), bool(raw.get("mlp_bias", False))
    variant = DecoderVariant(qkv_bias=bias, mlp_bias=mlp_bias, interleaved=True)
    return RotaryDecoder(config, variant, weights, max_model_len)
