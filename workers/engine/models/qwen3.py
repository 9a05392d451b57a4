"""Implement Qwen3 (dense): a norm over each query and key head, and a separate head size."""

from __future__ import annotations

from workers.engine.layers.weights import Weights
from workers.engine.models.config import Json, ModelConfig, layer_windows, require
from workers.engine.models.decoder import DecoderVariant, RotaryDecoder, decoder_config


def config(raw: Json) -> ModelConfig:
    windows = layer_windows(raw, require(raw, "num_hidden_layers"), default_window=4096)
    return decoder_config(raw, num_kv_heads=32, head_dim=128, max_position_embeddings=32768, windows=windows)


def build(raw: Json, config: ModelConfig, weights: Weights, max_model_len: int) -> RotaryDecoder:
    bias = bool(raw.get("attention_bias", False))
    variant = DecoderVariant(qkv_bias=bias, output_bias=bias, head_norm=True)
    return RotaryDecoder(config, variant, weights, max_model_len)
