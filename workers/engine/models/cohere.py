"""Implement Cohere and Cohere 2 (Command R and A, Aya): attention and MLP read the same normed
input, and heads are rotated in pairs side by side.

Most layers of Cohere 2 have a window, and the others no positions.
"""

from __future__ import annotations

from dataclasses import replace

from workers.engine.layers.weights import Weights
from workers.engine.models.config import (
    Json,
    ModelConfig,
    repeated_kinds,
    rotations_by_kind,
    sliding_window,
    windows_by_kind,
)
from workers.engine.models.decoder import DecoderVariant, RotaryDecoder, TensorNames, decoder_config

_DEFAULTS: Json = {"layer_norm_eps": 1e-5, "tie_word_embeddings": True}
_NAMES = TensorNames(mlp_norm=None)


def config(raw: Json) -> ModelConfig:
    raw = {**_DEFAULTS, "rope_theta": 5e5, **raw}
    return _scaled(raw, decoder_config(raw, max_position_embeddings=8192, norm_eps="layer_norm_eps"))


def cohere2_config(raw: Json) -> ModelConfig:
    raw, kinds = {**_DEFAULTS, **raw}, repeated_kinds(raw, raw.get("sliding_window_pattern", 4))
    windows = windows_by_kind(kinds, sliding_window(raw, 4096))
    config = decoder_config(raw, max_position_embeddings=8192, windows=windows, norm_eps="layer_norm_eps")
    return replace(_scaled(raw, config), ropes=(*config.ropes, None), rotations=rotations_by_kind(kinds))


def _scaled(raw: Json, config: ModelConfig) -> ModelConfig:
    scale = raw.get("logit_scale", 0.0625)
    return replace(config, logit_factor=1.0 if scale is None else float(scale))


def build(raw: Json, config: ModelConfig, weights: Weights, max_model_len: int) -> RotaryDecoder:
    bias = bool(raw.get("attention_bias", False))
    variant = DecoderVariant(
        _NAMES,
        qkv_bias=bias,
        output_bias=bias,
        layer_norm=True,
        norm_bias=False,
        own_head_norms=bool(raw.get("use_qk_norm", False)),
        parallel=True,
        interleaved=True,
    )
    return RotaryDecoder(config, variant, weights, max_model_len)
