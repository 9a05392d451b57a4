"""Attention over the paged cache behind one interface: `make_attention` picks a backend by name, and every backend takes prefill and
decode rows mixed in one call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.engine.errors import ModelLoadError

BACKENDS = ("torch",)


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The paged cache of one layer: `num_blocks` blocks of `block_size` tokens; block 0 is the null block, never handed out."""

    num_blocks: int
    block_size: int
    kv_heads: int
    head_dim: int

    def block_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values that one block of one layer takes."""
        return 2 * self.block_size * self.kv_heads * self.head_dim * dtype.itemsize


@dataclass(slots=True)
class AttentionMetadata:
    """N rows of T tokens. Row i's queries are the tokens `query_start[i]:query_start[i + 1]`, the last ones of `context_lens[i]`."""

    slot_mapping: Tensor  # int64 [T], where each token's key and value go: block * block_size + offset
    query_start: NDArray[np.int32]  # [N + 1]
    context_lens: NDArray[np.int32]  # [N], tokens in the cache once this step has written its own
    block_tables: NDArray[np.int32]  # [N, max_blocks]
    derived: dict[Any, Any] = field(default_factory=dict)  # what a backend works out once for all layers of the step


class Attention(Protocol):
    def new_cache(self, num_layers: int) -> list[Tensor]:
        """Zeroed caches, one per layer, in the backend's own layout."""
        ...

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer_cache: Tensor, metadata: AttentionMetadata, scale: float, window: int | None
    ) -> Tensor:
        """Writes k and v [T, kv_heads, d] to the cache, then attends q [T, heads, d] causally over each row's own context.

        `window` limits what a query sees to that many tokens, itself included. Returns [T, heads, d].
        """
        ...


def make_attention(name: str, shape: CacheShape, num_heads: int, dtype: torch.dtype, device: torch.device) -> Attention:
    """Raises ModelLoadError for a backend that does not exist."""
    if name not in ("auto", *BACKENDS):
        raise ModelLoadError(f"unknown attention backend {name!r}; choose auto or {', '.join(BACKENDS)}")
    from workers.engine.attention.reference import TorchAttention

    return TorchAttention(shape, num_heads, dtype, device)
