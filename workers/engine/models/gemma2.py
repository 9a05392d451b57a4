"""Implement Gemma 2: windows in every other layer, norms of results, and soft caps."""

from __future__ import annotations

from dataclasses import replace

from workers.engine.layers.weights import Weights
from workers.engine.models.config import Json, ModelConfig, repeated_kinds
from workers.engine.models.decoder import SANDWICH_NORMS, RotaryDecoder
from workers.engine.models.gemma import gemma_config, gemma_variant, refuse_both_sides


def config(raw: Json) -> ModelConfig:
    refuse_both_sides(raw)
    config = gemma_config(raw, 4, 8192, repeated_kinds(raw, 2))
    soft_cap, logit_cap = raw.get("attn_logit_softcapping", 50.0), raw.get("final_logit_softcapping", 30.0)
    layers = tuple(replace(layer, soft_cap=soft_cap) for layer in config.layers)
    return replace(config, layers=layers, logit_cap=logit_cap)


def build(raw: Json, config: ModelConfig, weights: Weights, max_model_len: int) -> RotaryDecoder:
    return RotaryDecoder(config, gemma_variant(raw, SANDWICH_NORMS), weights, max_model_len)
