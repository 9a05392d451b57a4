"""Implement OLMo 2: norms of what a layer's parts add, and of all heads together."""

from __future__ import annotations

from workers.engine.layers.weights import Weights
from workers.engine.models.config import Json, ModelConfig
from workers.engine.models.decoder import RESULT_NORMS, DecoderVariant, RotaryDecoder, decoder_config

_DEFAULTS: Json = {"rms_norm_eps": 1e-5}


def config(raw: Json) -> ModelConfig:
    return decoder_config({**_DEFAULTS, **raw}, max_position_embeddings=2048)


def build(raw: Json, config: ModelConfig, weights: Weights, max_model_len: int) -> RotaryDecoder:
    bias = bool(raw.get("attention_bias", False))
    variant = DecoderVariant(RESULT_NORMS, qkv_bias=bias, output_bias=bias, row_norm=True)
    return RotaryDecoder(config, variant, weights, max_model_len)
