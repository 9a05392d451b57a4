"""Implement Qwen2 and Qwen2.5: biases on queries, keys and values; a sliding window on the upper
layers if the config enables it.
"""

from __future__ import annotations

from workers.engine.layers.weights import Weights
from workers.engine.models.config import Json, ModelConfig, layer_windows, require
from workers.engine.models.decoder import DecoderVariant, RotaryDecoder, decoder_config


def config(raw: Json) -> ModelConfig:
    windows = layer_windows(raw, require(raw, "num_hidden_layers"), default_window=4096)
    return decoder_config(raw, num_kv_heads=32, max_position_embeddings=32768, windows=windows)


def build(raw: Json, config: ModelConfig, weights: Weights, max_model_len: int) -> RotaryDecoder:
    return RotaryDecoder(config, DecoderVariant(qkv_bias=True), weights, max_model_len)
