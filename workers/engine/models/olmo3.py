"""Implement OLMo 3: OLMo 2 with windows, outside of which RoPE may be scaled."""

from __future__ import annotations

from dataclasses import replace

from workers.engine.models import olmo2
from workers.engine.models.config import (
    Json,
    ModelConfig,
    repeated_kinds,
    ropes_by_kind,
    rotations_by_kind,
    sliding_window,
    windows_by_kind,
)
from workers.engine.models.decoder import decoder_config

_DEFAULTS: Json = {"rms_norm_eps": 1e-5}


def config(raw: Json) -> ModelConfig:
    raw, kinds = {**_DEFAULTS, **raw}, repeated_kinds(raw, 4)
    windows = windows_by_kind(kinds, sliding_window(raw, 4096))
    config = decoder_config(raw, max_position_embeddings=2048, windows=windows)
    theta = float(raw.get("rope_theta") or 5e5)
    ropes = ropes_by_kind(raw, config.max_position_embeddings, theta, theta)
    return replace(config, ropes=ropes, rotations=rotations_by_kind(kinds))


build = olmo2.build
