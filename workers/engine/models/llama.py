"""Implement Llama 1 to 3.x and models of the same shape."""

from __future__ import annotations

from workers.engine.layers.weights import Weights
from workers.engine.models.config import Json, ModelConfig
from workers.engine.models.decoder import DecoderVariant, RotaryDecoder, decoder_config


def config(raw: Json) -> ModelConfig:
    return decoder_config(raw, max_position_embeddings=2048)


def build(raw: Json, config: ModelConfig, weights: Weights, max_model_len: int) -> RotaryDecoder:
    bias = bool(raw.get("attention_bias", False))
    variant = DecoderVariant(qkv_bias=bias, output_bias=bias, mlp_bias=bool(raw.get("mlp_bias", False)))
    return RotaryDecoder(config, variant, weights, max_model_len)
