"""Implement SmolLM 3: Llama's shape, with every fourth layer without positions."""

from __future__ import annotations

from dataclasses import replace

from workers.engine.messages.errors import ModelLoadError
from workers.engine.models import llama
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

_DEFAULTS: Json = {"rope_theta": 2e6, "tie_word_embeddings": True}


def config(raw: Json) -> ModelConfig:
    raw = {**_DEFAULTS, **raw}
    count, interval = require(raw, "num_hidden_layers"), require(raw, "no_rope_layer_interval", 4)
    rotated = raw.get("no_rope_layers") or [(layer + 1) % interval for layer in range(count)]  # 0 for none
    if len(rotated) < count:
        raise ModelLoadError(
            f"config.json names no_rope_layers for {len(rotated)} layers, but num_hidden_layers is {count}"
        )
    window = sliding_window(raw) if raw.get("use_sliding_window") else None
    kinds = [FULL if turns or window is None else SLIDING for turns in rotated[:count]]
    windows = windows_by_kind(layer_kinds(raw, kinds), window)
    config = decoder_config(raw, num_kv_heads=4, max_position_embeddings=32768, windows=windows)
    return replace(config, ropes=(*config.ropes, None), rotations=tuple(int(not turns) for turns in rotated[:count]))


build = llama.build
