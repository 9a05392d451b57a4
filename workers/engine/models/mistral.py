"""Implement Mistral: Llama's shape with a sliding window over all layers."""

from __future__ import annotations

from workers.engine.layers.weights import Weights
from workers.engine.models.config import Json, ModelConfig, require
from workers.engine.models.decoder import DecoderVariant, RotaryDecoder, decoder_config


def config(raw: Json) -> ModelConfig:
    window = raw.get("sliding_window", 4096)
    windows = (None if window is None else int(window),) * require(raw, "num_hidden_layers")
    return decoder_config(raw, num_kv_heads=8, max_position_embeddings=131072, windows=windows)


def build(raw: Json, config: ModelConfig, weights: Weights, max_model_len: int) -> RotaryDecoder:
    return RotaryDecoder(config, DecoderVariant(), weights, max_model_len)
