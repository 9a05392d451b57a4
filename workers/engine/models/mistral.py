"""Implement Mistral: Llama's shape with a sliding window over all layers."""

from __future__ import annotations

from workers.engine.layers.weights import Weights
from workers.engine.models.config import Json, ModelConfig, require, sliding_window
from workers.engine.models.decoder import DecoderVariant, RotaryDecoder, decoder_config


def config(raw: Json) -> ModelConfig:
    windows = (sliding_window(raw, 4096),) * require(raw, "num_hidden_layers")
    return decoder_config(raw, num_kv_heads=8, max_position_embeddings=131072, windows=windows)


def build(raw: Json, config: ModelConfig, weights: Weights, max_model_len: int) -> RotaryDecoder:
    return RotaryDecoder(config, DecoderVariant(), weights, max_model_len)
