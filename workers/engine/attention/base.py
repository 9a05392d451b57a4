"""Define attention over the paged cache. Every backend takes prefill and decode rows mixed in one
call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.engine.layers.base import AttentionPattern, AttentionShape, RotaryHeads


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The paged cache of one layer: `num_blocks` blocks of `block_size` tokens.

    Block 0 is the null block, which is never allocated. `dtype` is the dtype of keys and values if
    it differs from the dtype of the computation. Layers of several shapes share pages that may be
    larger than a block: `page_keys` is the size of a page's keys in numbers.
    """

    num_blocks: int
    block_size: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype | None = None
    page_keys: int | None = None  # None for as many as a block has

    @property
    def stride(self) -> int:
        """Return the numbers from a block's keys to those of the next, as from values to values."""
        return self.page_keys or self.block_size * self.kv_heads * self.head_dim

    def stored_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of stored keys and values for an attention that computes in `dtype`."""
        return self.dtype or dtype

    def block_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of one block of one layer, keys and values, and of its padding."""
        return 2 * self.stride * dtype.itemsize


@dataclass(slots=True)
class AttentionMetadata:
    """N rows of T tokens.

    The queries of row i are the tokens `query_start[i]:query_start[i + 1]`, the last ones of
    `context_lens[i]`.
    """

    # Int64 [T], the cache position of each token's key and value: block * block_size + offset
    slot_mapping: Tensor
    query_start: NDArray[np.int32]  # [N + 1]
    context_lens: NDArray[np.int32]  # [N], tokens in the cache, this step's included
    block_tables: NDArray[np.int32]  # [N, max_blocks]
    # The backend's data shared by layers of the step, by their attention and pattern
    prepared: dict[tuple[Attention, AttentionPattern], Any] = field(default_factory=dict)


@dataclass(slots=True)
class DeviceMetadata:
    """N rows of T tokens in device memory, for kernels that read the lengths themselves.

    It may be recorded in a CUDA graph. Each step and each recording needs its own metadata, since
    `prepared` holds data computed for it, also on the device. Metadata that differ only in places
    of blocks may share it.
    """

    slot_mapping: Tensor  # int64 [T]; tokens of padding rows map into the null block
    query_start: Tensor  # int32 [N + 1]
    context_lens: Tensor  # int32 [N], this step's tokens included; 0 for a padding row
    slots: Tensor  # int32 [N], each row's row in block_tables; 0 for a padding row
    block_tables: Tensor  # int32 [num_slots, max_blocks], the whole table
    # Most tokens of one row, known on the host: it selects the kernel, which never reads it
    max_query: int
    # Upper bound of context_lens, known on the host (in a graph: the largest possible value)
    max_context: int
    # The same, also by whether the stream is being recorded
    prepared: dict[tuple[Attention, AttentionPattern, bool], Any] = field(default_factory=dict)


Metadata = AttentionMetadata | DeviceMetadata


class Attention(Protocol):
    """Attention over the paged cache.

    A backend takes one kind of metadata: "torch" and "cpu" AttentionMetadata, "triton"
    DeviceMetadata.
    """

    lazy_cache: bool
    """Whether a new cache has the shape [num_blocks, …], with memory allocated on first access."""

    def new_cache(self, num_layers: int) -> list[Tensor]:
        """Return zeroed caches, one per layer, in the backend's own layout."""
        ...

    def view(self, cache: Tensor) -> Tensor:
        """Return the memory of another attention's cache, with pages as many and as large, in this
        one's shape.
        """
        ...

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer_cache: Tensor,
        metadata: Metadata,
        shape: AttentionShape,
        sinks: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Write k and v [T, kv_heads, d], unless they are None, to the cache, then compute the
        attention of q [T, heads, d].

        Each query attends to the tokens of its row that the pattern of `shape` allows. A score is
        the scaled product of query and key, limited by the soft cap. `bias`, float32 [heads, 2 *
        reach + 1], is added to scores by the distance of the key ahead of its query: from -reach to
        reach, clamped at the ends. `sinks`, contiguous: see `AttentionPart`. Returns [T, heads, d];
        zeros for a row without context.
        """
        ...

    def forward_rotary(
        self,
        qkv: Tensor,
        rotary: RotaryHeads,
        layer_cache: Tensor,
        metadata: Metadata,
        shape: AttentionShape,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute `forward` from qkv [T, heads + 2 * kv_heads, d], whose queries and keys are not
        yet normed and rotated; without keys and values from [T, heads, d].
        """
        ...
