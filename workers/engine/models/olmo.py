"""Implement OLMo 2 and 3: norms of what a layer's parts add, and of all heads together.

Most layers of OLMo 3 have a window.
"""

from __future__ import annotations

from dataclasses import replace

from workers.engine.layers.weights import Weights
from workers.engine.models.config import (
    Json,
    ModelConfig,
    repeated_kinds,
    ropes_by_kind,
    rotations_by_kind,
    sliding_window,
    windows_by_kind,
)
from workers.engine.models.decoder import RESULT_NORMS, DecoderVariant, RotaryDecoder, decoder_config

_DEFAULTS: Json = {"rms_norm_eps": 1e-5}


def olmo2_config(raw: Json) -> ModelConfig:
    return decoder_config({**_DEFAULTS, **raw}, max_position_embeddings=2048)


def olmo3_config(raw: Json) -> ModelConfig:
    raw, kinds = {**_DEFAULTS, **raw}, repeated_kinds(raw, 4)
    windows = windows_by_kind(kinds, sliding_window(raw, 4096))
    config = decoder_config(raw, max_position_embeddings=2048, windows=windows)
    theta = float(raw.get("rope_theta") or 5e5)
    ropes = ropes_by_kind(raw, config.max_position_embeddings, theta, theta)
    return replace(config, ropes=ropes, rotations=rotations_by_kind(kinds))


def build(raw: Json, config: ModelConfig, weights: Weights, max_model_len: int) -> RotaryDecoder:
    bias = bool(raw.get("attention_bias", False))
    variant = DecoderVariant(RESULT_NORMS, qkv_bias=bias, output_bias=bias, row_norm=True)
    return RotaryDecoder(config, variant, weights, max_model_len)
