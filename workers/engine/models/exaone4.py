"""Implement EXAONE 4: norms of heads and of what a layer's parts add; where most layers have a
window, the others have no positions.
"""

from __future__ import annotations

from dataclasses import replace

from workers.engine.layers.weights import Weights
from workers.engine.models.config import (
    FULL,
    Json,
    ModelConfig,
    layer_kinds,
    patterned_kinds,
    require,
    rotations_by_kind,
    sliding_window,
    windows_by_kind,
)
from workers.engine.models.decoder import RESULT_NORMS, DecoderVariant, RotaryDecoder, decoder_config

_DEFAULTS: Json = {"rms_norm_eps": 1e-5}
_VARIANT = DecoderVariant(RESULT_NORMS, head_norm=True)


def config(raw: Json) -> ModelConfig:
    raw, window = {**_DEFAULTS, **raw}, sliding_window(raw, 4096)
    if window is None:
        layer_kinds(raw, [FULL] * require(raw, "num_hidden_layers"), (FULL,))
        return decoder_config(raw, num_kv_heads=32, max_position_embeddings=2048)
    pattern = raw.get("sliding_window_pattern")
    kinds = patterned_kinds({**raw, "sliding_window_pattern": len(pattern)} if isinstance(pattern, str) else raw, 4)
    windows = windows_by_kind(kinds, window)
    config = decoder_config(raw, num_kv_heads=32, max_position_embeddings=2048, windows=windows)
    return replace(config, ropes=(*config.ropes, None), rotations=rotations_by_kind(kinds))


def build(raw: Json, config: ModelConfig, weights: Weights, max_model_len: int) -> RotaryDecoder:
    return RotaryDecoder(config, _VARIANT, weights, max_model_len)
