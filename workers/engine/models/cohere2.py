"""Implement Cohere 2 (Command R7B and A): Cohere with windows, outside of which layers have no
positions.
"""

from __future__ import annotations

from dataclasses import replace

from workers.engine.models import cohere
from workers.engine.models.config import (
    Json,
    ModelConfig,
    patterned_kinds,
    rotations_by_kind,
    sliding_window,
    windows_by_kind,
)


def config(raw: Json) -> ModelConfig:
    kinds = patterned_kinds(raw, 4)
    config = cohere.cohere_config(raw, windows_by_kind(kinds, sliding_window(raw, 4096)))
    return replace(config, ropes=(*config.ropes, None), rotations=rotations_by_kind(kinds))


build = cohere.build
