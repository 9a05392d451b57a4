"""Say which layers of Gemma 4 have which heads, and whose keys they read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from workers.engine.layers.base import AttentionShape
from workers.engine.messages.errors import ModelLoadError
from workers.engine.models.config import FULL, Json, repeated_kinds, require


def layer_kinds_of(raw: Json) -> Sequence[str]:
    """Return the kinds of layers, of which the last is always without a window."""
    return [*repeated_kinds(raw, 6)[:-1], FULL]


def with_own_heads(raw: Json, layers: Sequence[AttentionShape], kinds: Sequence[str]) -> list[AttentionShape]:
    """Return the layers with the heads of their kind."""
    if raw.get("per_layer_config") is not None:  # as transformers 5.24 saves it
        own = [raw["per_layer_config"].get(str(index), {}) for index in range(len(layers))]
    else:
        of_full = {"head_dim": require(raw, "global_head_dim", 512)}
        if raw.get("attention_k_eq_v", False) and raw.get("num_global_key_value_heads"):
            of_full["num_key_value_heads"] = require(raw, "num_global_key_value_heads")
        own = [of_full if kind == FULL else {} for kind in kinds]
    return [
        replace(
            layer,
            kv_heads=require(each, "num_key_value_heads", layer.kv_heads),
            head_dim=require(each, "head_dim", layer.head_dim),
        )
        for layer, each in zip(layers, own, strict=True)
    ]


def with_shared_keys(raw: Json, layers: Sequence[AttentionShape], kinds: Sequence[str]) -> tuple[AttentionShape, ...]:
    """Return the layers, of which the last ones read the keys of an earlier one: the last of their
    kind that has its own.
    """
    first = len(layers) - int(raw.get("num_kv_shared_layers") or 0)
    keeping = {kind: index for index, kind in enumerate(kinds[:first])}
    if missing := [kind for kind in kinds[first:] if kind not in keeping]:
        raise ModelLoadError(
            f"config.json sets num_kv_shared_layers so that no {missing[0]} layer has keys to share; lower it"
        )
    return (*layers[:first], *(replace(layers[i], reads=keeping[kinds[i]]) for i in range(first, len(layers))))
