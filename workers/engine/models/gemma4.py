"""Implement the dense text models of Gemma 4: global layers have heads of another size, and values
that may be their keys; small models add an input of its own to each layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from workers.engine.layers.base import AttentionShape
from workers.engine.layers.weights import Weights
from workers.engine.messages.errors import ModelLoadError
from workers.engine.models.config import (
    FULL,
    Json,
    ModelConfig,
    repeated_kinds,
    require,
    ropes_by_kind,
    rotations_by_kind,
)
from workers.engine.models.decoder import SANDWICH_NORMS, LayerInputSize, RotaryDecoder
from workers.engine.models.gemma import gemma_config, gemma_variant
from workers.engine.models.gemma3 import to_both_sides

_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
_DEFAULTS: Json = {"sliding_window": 512, "rope_parameters": _ROPES}


def config(raw: Json) -> ModelConfig:
    raw = {**_DEFAULTS, **raw}
    if raw.get("enable_moe_block"):
        raise ModelLoadError("config.json sets enable_moe_block, and experts of Gemma 4 cannot run; use a dense model")
    if raw.get("num_kv_shared_layers"):
        raise ModelLoadError(
            "config.json sets num_kv_shared_layers, and layers cannot share keys yet; use a model without"
        )
    kinds = _kinds(raw)
    config = gemma_config(raw, 4, 131072, kinds, scalar=1.0)
    layers = tuple(_layer(raw, config.layers[index], kind, index) for index, kind in enumerate(kinds))
    if len({(layer.kv_heads, layer.head_dim) for layer in layers}) > 1:
        raise ModelLoadError("config.json gives layers heads of several sizes, which cannot run yet; use another model")
    if raw.get("use_bidirectional_attention") == "all":
        layers = tuple(map(to_both_sides, layers))
    ropes = ropes_by_kind(raw, config.max_position_embeddings, 1e4, 1e6)
    cap = raw.get("final_logit_softcapping")
    return replace(config, layers=layers, ropes=ropes, rotations=rotations_by_kind(kinds), logit_cap=cap)


def _kinds(raw: Json) -> Sequence[str]:
    """Return the kinds of layers, of which the last is always without a window."""
    return [*repeated_kinds(raw, 6)[:-1], FULL]


def _layer(raw: Json, layer: AttentionShape, kind: str, index: int) -> AttentionShape:
    by_layer = raw.get("per_layer_config")
    if by_layer is not None:  # as transformers 5.24 saves it
        own = by_layer.get(str(index), {})
        return replace(
            layer, kv_heads=own.get("num_key_value_heads", layer.kv_heads), head_dim=own.get("head_dim", layer.head_dim)
        )
    if kind != FULL:
        return layer
    kv_heads = raw.get("num_global_key_value_heads") if raw.get("attention_k_eq_v", False) else None
    return replace(layer, kv_heads=kv_heads or layer.kv_heads, head_dim=require(raw, "global_head_dim", 512))


def build(raw: Json, config: ModelConfig, weights: Weights, max_model_len: int) -> RotaryDecoder:
    own = raw.get("hidden_size_per_layer_input", 256)
    full = [layer for layer, kind in enumerate(_kinds(raw)) if kind == FULL]
    variant = replace(
        gemma_variant(raw, SANDWICH_NORMS, head_norm=True),
        norm_offset=0.0,
        value_norm=True,
        keys_as_values=tuple(full) if raw.get("attention_k_eq_v", False) else (),
        layer_scalars=True,
        layer_inputs=LayerInputSize(require(raw, "vocab_size_per_layer_input", 262144), own) if own else None,
    )
    return RotaryDecoder(config, variant, weights, max_model_len)
