"""Implement Mistral, Ministral and Ministral 3: Llama's shape with sliding windows."""

from __future__ import annotations

from dataclasses import replace

from workers.engine.layers.query_temperature import QueryTemperature
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

_MINISTRAL3: Json = {
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}


def config(raw: Json) -> ModelConfig:
    windows = (sliding_window(raw, 4096),) * require(raw, "num_hidden_layers")
    return decoder_config(raw, num_kv_heads=8, max_position_embeddings=131072, windows=windows)


def ministral_config(raw: Json) -> ModelConfig:
    window, count = sliding_window(raw, 4096), require(raw, "num_hidden_layers")
    kinds = layer_kinds(raw, [FULL if window is None else SLIDING] * count)
    windows = windows_by_kind(kinds, window)
    return decoder_config(raw, num_kv_heads=8, max_position_embeddings=131072, windows=windows)


def ministral3_config(raw: Json) -> ModelConfig:
    raw = {**_MINISTRAL3, **raw}
    windows = (sliding_window(raw),) * require(raw, "num_hidden_layers")
    config = decoder_config(raw, num_kv_heads=8, head_dim=128, max_position_embeddings=262144, windows=windows)
    scaling = raw["rope_parameters"]
    length = scaling.get("original_max_position_embeddings", config.max_position_embeddings)
    temperature = QueryTemperature(float(scaling["llama_4_scaling_beta"]), int(length))
    return replace(config, query_temperature=temperature)


def build(raw: Json, config: ModelConfig, weights: Weights, max_model_len: int) -> RotaryDecoder:
    return RotaryDecoder(config, DecoderVariant(), weights, max_model_len)
