"""Implement InternLM 3: Llama's shape with a separate head size and one switch for biases."""

from __future__ import annotations

from workers.engine.layers.weights import Weights
from workers.engine.models.config import Json, ModelConfig
from workers.engine.models.decoder import DecoderVariant, RotaryDecoder, decoder_config

_DEFAULTS = {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5}


def config(raw: Json) -> ModelConfig:
    return decoder_config({**_DEFAULTS, **raw}, max_position_embeddings=32768)


def build(raw: Json, config: ModelConfig, weights: Weights, max_model_len: int) -> RotaryDecoder:
    bias = bool(raw.get("attention_bias", raw.get("qkv_bias", False)))
    variant = DecoderVariant(qkv_bias=bias, output_bias=bias, mlp_bias=bias)
    return RotaryDecoder(config, variant, weights, max_model_len)
