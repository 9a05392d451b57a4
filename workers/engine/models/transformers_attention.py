"""Register the engine's attention as one of transformers' attention functions, and two functions
that only observe how a class calls it.

A class that supports other attention functions (`_supports_attention_backend`) looks the function
up by the name in its configuration, passes on the keywords given to its forward, and builds no mask
if no mask function has that name. So the step's attention is passed as the keyword `attend`, and a
class under `PAGED` runs without masks and without a cache of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from workers.engine.layers.base import AttentionContext

PAGED = "paged_rows"
WATCHED = "paged_rows_watched"
"""An attention function that computes nothing; it appends a `LayerCall` for each call to the list
`attend`.
"""
MASKED = "paged_rows_masked"
"""The same, with masks: each is a single number that describes the tokens visible to a query."""

# Arguments that every class passes to its attention, or that have no effect there. The engine would
# have to implement any other argument that is set.
_HARMLESS = frozenset(
    {
        "cache_position",
        "is_causal",
        "output_attentions",
        "output_hidden_states",
        "past_key_values",
        "position_embeddings",
    }
    | {"position_ids", "return_dict", "use_cache"}
)
_NAMED = {"position_bias": "a bias by position"}

ALL_BEFORE = 0
OTHER = -1


@dataclass(frozen=True, slots=True)
class LayerCall:
    """How one layer called its attention."""

    layer: int | None
    heads: int
    kv_heads: int
    head_dim: int
    scale: float | None
    soft_cap: float | None  # of scores
    window: int | None  # tokens visible to a query, itself included; None for all before it
    # The same by the class's own mask: ALL_BEFORE, a window, or OTHER; None if it built none
    mask: int | None
    objection: str | None  # a feature of the call that the engine's attention lacks


def attend_rows(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attend: AttentionContext,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute attention for T tokens of any rows: query [1, heads, T, d], key and value [1,
    kv_heads, T, d], sinks `s_aux` [heads] -> [1, T, heads, d].
    """
    layer = cast(int, module.layer_idx)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return attend(layer, q, k, v, None if s_aux is None else s_aux.float().contiguous())[None], None


def watch(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    attend: list[LayerCall] | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    if attend is None:
        raise ValueError("its layers do not pass keywords on to their attention")
    layer = getattr(module, "layer_idx", None)
    mask = None if attention_mask is None else int(attention_mask)
    objection = _objection(query, key, value, s_aux, others)
    heads, kv_heads, head_dim = query.shape[1], key.shape[1], query.shape[3]
    attend.append(LayerCall(layer, heads, kv_heads, head_dim, scaling, softcap, sliding_window, mask, objection))
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def _objection(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, others: dict[str, Any]) -> str | None:
    if value.shape[3] != key.shape[3] or key.shape[3] != query.shape[3]:
        return f"keys of {key.shape[3]} and values of {value.shape[3]} numbers a head"
    if key.shape[2] != query.shape[2]:
        return "keys of more tokens than the step has"
    if sinks is not None and sinks.shape != query.shape[1:2]:
        return f"attention sinks of shape {list(sinks.shape)}"
    if others.get("is_causal") is False:
        return "attention to later tokens"
    unknown = [
        name for name, value in others.items() if name not in _HARMLESS and value is not None and value is not False
    ]
    return _NAMED.get(unknown[0], f"the attention argument {unknown[0]!r}") if unknown else None


def describe_mask(
    *, mask_function: Callable[..., Tensor], config: Any, device: torch.device | str = "cpu", **_: Any
) -> Tensor:
    """Return int64 [1, 1, 1, 1]: the tokens visible to a late query, in the form of
    `LayerCall.mask`.
    """
    far = 2 * int(getattr(config, "max_position_embeddings", None) or 1 << 17)
    # A chunked mask changes from one chunk to the next
    seen = {_visible(mask_function, query) for query in (far, far + 1)}
    return torch.full((1, 1, 1, 1), seen.pop() if len(seen) == 1 else OTHER, device=device)


def _visible(mask_function: Callable[..., Tensor], query: int) -> int:
    zero = torch.zeros((), dtype=torch.int64)
    visible = mask_function(zero, zero, zero + query, torch.arange(query + 2))
    count = int(visible.sum())
    if count == 0 or not bool(visible[query + 1 - count : query + 1].all()):
        return OTHER
    return ALL_BEFORE if count == query + 1 else count


AttentionInterface.register(PAGED, attend_rows)
AttentionInterface.register(WATCHED, watch)
AttentionInterface.register(MASKED, watch)
AttentionMaskInterface.register(MASKED, describe_mask)
