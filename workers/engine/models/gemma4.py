"""Implement the dense text models of Gemma 4: global layers have heads of another size, and values
that may be their keys; small models add an input of its own to each layer.
"""

from __future__ import annotations

from dataclasses import replace

from workers.engine.layers.weights import Weights
from workers.engine.messages.errors import ModelLoadError
from workers.engine.models.config import (
    FULL,
    Json,
    ModelConfig,
    require,
    ropes_by_kind,
    rotations_by_kind,
)
from workers.engine.models.decoder import SANDWICH_NORMS, LayerInputSize, RotaryDecoder
from workers.engine.models.gemma import gemma_config, gemma_variant
from workers.engine.models.gemma3 import to_both_sides
from workers.engine.models.gemma4_layers import layer_kinds_of, with_own_heads, with_shared_keys

_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
_DEFAULTS: Json = {"sliding_window": 512, "rope_parameters": _ROPES}


def config(raw: Json) -> ModelConfig:
    raw = {**_DEFAULTS, **raw}
    if raw.get("enable_moe_block"):
        raise ModelLoadError("config.json sets enable_moe_block, and experts of Gemma 4 cannot run; use a dense model")
    kinds = layer_kinds_of(raw)
    config = gemma_config(raw, 4, 131072, kinds, scalar=1.0)
    layers = with_shared_keys(raw, with_own_heads(raw, config.layers, kinds), kinds)
    if raw.get("use_bidirectional_attention") == "all":
        layers = tuple(map(to_both_sides, layers))
    ropes = ropes_by_kind(raw, config.max_position_embeddings, 1e4, 1e6)
    cap = raw.get("final_logit_softcapping")
    return replace(config, layers=layers, ropes=ropes, rotations=rotations_by_kind(kinds), logit_cap=cap)


def build(raw: Json, config: ModelConfig, weights: Weights, max_model_len: int) -> RotaryDecoder:
    wide = bool(raw.get("use_double_wide_mlp", False))
    own = raw.get("hidden_size_per_layer_input", 256)
    full = [layer for layer, kind in enumerate(layer_kinds_of(raw)) if kind == FULL]
    variant = replace(
        gemma_variant(raw, SANDWICH_NORMS, head_norm=True),
        norm_offset=0.0,
        value_norm=True,
        mlp_sizes=tuple(config.intermediate_size * (1 + (wide and layer.reads is not None)) for layer in config.layers),
        keys_as_values=tuple(full) if raw.get("attention_k_eq_v", False) else (),
        layer_scalars=True,
        layer_inputs=LayerInputSize(require(raw, "vocab_size_per_layer_input", 262144), own) if own else None,
    )
    return RotaryDecoder(config, variant, weights, max_model_len)
