"""Attention over the paged cache behind one interface: every backend takes prefill and decode rows
mixed in one call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.engine.layers.base import AttentionPattern, RotaryHeads


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The paged cache of one layer: `num_blocks` blocks of `block_size` tokens; block 0 is the null
    block, never handed out.

    `dtype` is that of keys and values, where it is not the one that attention computes in.
    """

    num_blocks: int
    block_size: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype | None = None

    def stored_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return that of keys and values of an attention that computes in `dtype`."""
        return self.dtype or dtype

    def block_bytes(self, dtype: torch.dtype) -> int:
        """Return bytes of keys and values that one block of one layer takes."""
        return 2 * self.block_size * self.kv_heads * self.head_dim * dtype.itemsize


@dataclass(slots=True)
class AttentionMetadata:
    """N rows of T tokens.

    Row i's queries are the tokens `query_start[i]:query_start[i + 1]`, the last ones of
    `context_lens[i]`.
    """

    # Int64 [T], where each token's key and value go: block * block_size + offset
    slot_mapping: Tensor
    query_start: NDArray[np.int32]  # [N + 1]
    context_lens: NDArray[np.int32]  # [N], tokens in the cache once this step has written its own
    block_tables: NDArray[np.int32]  # [N, max_blocks]
    # By pattern, what the backend has worked out once for all layers of the step
    prepared: dict[AttentionPattern, Any] = field(default_factory=dict)


@dataclass(slots=True)
class DeviceMetadata:
    """N rows of T tokens in device memory, for kernels that read lengths themselves; may be
    recorded in a CUDA graph.

    Each step and each recording has metadata of its own, for `prepared` holds what was worked out
    for it, on the device too.
    """

    slot_mapping: Tensor  # int64 [T]; tokens of padding rows map into the null block
    query_start: Tensor  # int32 [N + 1]
    context_lens: Tensor  # int32 [N], this step's tokens included; 0 for a padding row
    slots: Tensor  # int32 [N], each row's row in block_tables; 0 for a padding row
    block_tables: Tensor  # int32 [num_slots, max_blocks], the whole table
    # Most tokens of one row, known on the host: picks the kernel, never a length inside it
    max_query: int
    # Bound of context_lens, known on the host (in a graph: the largest there can be)
    max_context: int
    # As above, by pattern and whether the stream is being recorded
    prepared: dict[tuple[AttentionPattern, bool], Any] = field(default_factory=dict)


Metadata = AttentionMetadata | DeviceMetadata


class Attention(Protocol):
    """A backend takes one kind of metadata: "torch" and "cpu" AttentionMetadata, "triton"
    DeviceMetadata.
    """

    lazy_cache: bool
    """Whether a new cache is [num_blocks, …], and gets its memory as it is touched."""

    def new_cache(self, num_layers: int) -> list[Tensor]:
        """Zeroed caches, one per layer, in the backend's own layout."""
        ...

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer_cache: Tensor,
        metadata: Metadata,
        scale: float,
        pattern: AttentionPattern,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Write k and v [T, kv_heads, d] to the cache, then attend q [T, heads, d] over what
        `pattern` lets each query see of its row's own context.

        `bias`, float32 [heads, 2 * reach + 1], is added to scores by how far ahead of its query a
        key is: from -reach to reach, and beyond as at the ends. Returns [T, heads, d]; zeros for a
        row without context.
        """
        ...

    def forward_rotary(
        self,
        qkv: Tensor,
        rotary: RotaryHeads,
        layer_cache: Tensor,
        metadata: Metadata,
        scale: float,
        pattern: AttentionPattern,
    ) -> Tensor:
        """As `forward`, from qkv [T, heads + 2 * kv_heads, d] whose queries and keys are yet to be
        normed and rotated.
        """
        ...
