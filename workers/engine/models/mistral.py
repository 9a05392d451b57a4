"""Implement Mistral, Ministral and Ministral 3: Llama's shape with sliding windows."""

from __future__ import annotations

from workers.engine.layers.weights import Weights
from workers.engine.models.config import (
    FULL,
    SLIDING,
    Json,
    ModelConfig,
    layer_kinds,
    require,
    sliding_window,
    windows_by_kind,
)
from workers.engine.models.decoder import DecoderVariant, RotaryDecoder, decoder_config


def config(raw: Json) -> ModelConfig:
    windows = (sliding_window(raw, 4096),) * require(raw, "num_hidden_layers")
    return decoder_config(raw, num_kv_heads=8, max_position_embeddings=131072, windows=windows)


def ministral_config(raw: Json) -> ModelConfig:
    window, count = sliding_window(raw, 4096), require(raw, "num_hidden_layers")
    kinds = layer_kinds(raw, [FULL if window is None else SLIDING] * count)
    windows = windows_by_kind(kinds, window)
    return decoder_config(raw, num_kv_heads=8, max_position_embeddings=131072, windows=windows)


def build(raw: Json, config: ModelConfig, weights: Weights, max_model_len: int) -> RotaryDecoder:
    return RotaryDecoder(config, DecoderVariant(), weights, max_model_len)
