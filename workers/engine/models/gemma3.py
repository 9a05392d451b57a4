"""Implement the text model of Gemma 3, whose layers with a window have a rotation of their own, and
EmbeddingGemma, which attends to both sides.
"""

from __future__ import annotations

from dataclasses import replace

from workers.engine.layers.base import AttentionPattern, AttentionShape
from workers.engine.layers.weights import Weights
from workers.engine.models.config import Json, ModelConfig, patterned_kinds, ropes_by_kind, rotations_by_kind
from workers.engine.models.decoder import SANDWICH_NORMS, RotaryDecoder
from workers.engine.models.gemma import gemma_config, gemma_variant


def config(raw: Json) -> ModelConfig:
    kinds = patterned_kinds(raw, 6)
    config = gemma_config(raw, 4, 131072, kinds)
    local, full = ropes_by_kind(
        raw,
        config.max_position_embeddings,
        raw.get("rope_local_base_freq") or 1e4,
        raw.get("rope_theta") or 1e6,
    )
    if full.kind == "linear":  # max_position_embeddings includes its factor
        full = replace(full, max_position_embeddings=int(full.max_position_embeddings / full.scaling["factor"]))
    layers = config.layers
    if raw.get("use_bidirectional_attention"):
        layers = tuple(map(to_both_sides, layers))
    return replace(
        config,
        layers=layers,
        ropes=(local, full),
        rotations=rotations_by_kind(kinds),
        logit_cap=raw.get("final_logit_softcapping"),
    )


def to_both_sides(layer: AttentionShape) -> AttentionShape:
    """Return a layer whose window, if any, is half before and half after a token."""
    window = layer.pattern.window
    return replace(layer, pattern=AttentionPattern(False, None if window is None else window // 2))


def build(raw: Json, config: ModelConfig, weights: Weights, max_model_len: int) -> RotaryDecoder:
    return RotaryDecoder(config, gemma_variant(raw, SANDWICH_NORMS, head_norm=True), weights, max_model_len)
