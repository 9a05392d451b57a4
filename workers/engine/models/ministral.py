"""Implement Ministral: Mistral with layers without a window."""

from __future__ import annotations

from workers.engine.models import mistral
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
from workers.engine.models.decoder import decoder_config


def config(raw: Json) -> ModelConfig:
    window, count = sliding_window(raw, 4096), require(raw, "num_hidden_layers")
    windows = windows_by_kind(layer_kinds(raw, [FULL if window is None else SLIDING] * count), window)
    return decoder_config(raw, num_kv_heads=8, max_position_embeddings=131072, windows=windows)


build = mistral.build
