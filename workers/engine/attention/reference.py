"""Implement attention in plain torch: correct on every device, and fast enough for a CPU.

The cache is [2, blocks, kv_heads, block_size, d]. Blocks are gathered head by head, so those of a
group of rows directly form the batched matrix of the product. Decode rows are sorted by context
length and processed in groups whose gathered keys fit the processor's cache; rows with several
tokens are processed one by one. There is no loop over tokens.

A row reads only its own blocks. Values of an earlier owner after the row's last token are cleared
when the row enters the block, since a mask does not exclude a NaN or infinity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from workers.engine.attention.base import AttentionMetadata, CacheShape, Metadata
from workers.engine.layers.base import AttentionPattern, AttentionShape, RotaryHeads
from workers.engine.layers.rotary import prepare, rotate

_GROUP_BYTES = {"cpu": 4 << 20, "cuda": 256 << 20}
_ALIGNMENT = 64  # bytes, as in torch


Slots = tuple[Tensor, Tensor]
"""Positions in the cache: blocks and offsets in them, int64."""


@dataclass(slots=True)
class DecodeGroup:
    """B decode rows with one token each, processed together and padded to the longest."""

    tokens: Tensor  # int64 [B], positions of the rows' tokens in the step
    blocks: Tensor  # int64 [kv_heads * B * blocks], see `_flat_blocks`
    mask: Tensor  # float32 [B, 1, L], 0 or -inf


@dataclass(slots=True)
class PrefillRow:
    """One row of several tokens."""

    first: int
    last: int  # exclusive
    # Int64 [kv_heads * blocks]; None if the keys of the call are its whole context
    blocks: Tensor | None
    context: int  # tokens gathered
    # Bool [n, L], or float values to add to scores [heads, n, L]; None if every token is visible,
    # or every earlier one if it is causal
    mask: Tensor | None
    causal: bool


@dataclass(slots=True)
class Groups:
    """A step's rows, for layers of one pattern and bias."""

    decode: list[DecodeGroup]
    prefill: list[PrefillRow]
    slots: Slots  # of the step's tokens
    stale: Slots | None  # to clear before any write; None without any
    bias: Tensor | None
    stores: bool  # whether the layers store keys and values


class TorchAttention:
    lazy_cache = False

    def __init__(self, shape: CacheShape, num_heads: int, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = shape
        self._heads = num_heads
        self._per_kv = num_heads // shape.kv_heads
        self._dtype = dtype
        self._device = device
        head = shape.block_size * shape.head_dim
        # Each head of each block begins at a multiple of this place
        self._step = math.gcd(shape.stride, head)
        self._head_offset = torch.arange(shape.kv_heads)[:, None] * (head // self._step)
        self._row_bytes = shape.kv_heads * shape.head_dim * dtype.itemsize
        self._group_bytes = _GROUP_BYTES.get(device.type, _GROUP_BYTES["cuda"])

    def new_cache(self, num_layers: int) -> list[Tensor]:
        size = (2, self._shape.num_blocks, self._shape.stride)
        if self._device.type != "cpu":
            pages = [torch.zeros(size, dtype=self._dtype, device=self._device) for _ in range(num_layers)]
        else:
            pages = [_lazy_zeros(size, self._dtype) for _ in range(num_layers)]
        return [self.view(of_layer) for of_layer in pages]

    def view(self, cache: Tensor) -> Tensor:
        s = self._shape
        inner = s.block_size * s.head_dim, s.head_dim, 1
        return cache.as_strided(
            (2, s.num_blocks, s.kv_heads, s.block_size, s.head_dim), (s.num_blocks * s.stride, s.stride, *inner)
        )

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
        assert isinstance(metadata, AttentionMetadata)
        keys, values = layer_cache[0], layer_cache[1]
        pattern = shape.pattern
        groups: Groups | None = metadata.prepared.get((self, pattern))
        if groups is None or groups.bias is not bias or groups.stores is (k is None):
            groups = metadata.prepared[self, pattern] = self._groups(metadata, pattern, bias, k is not None)
        if k is not None and v is not None:
            if groups.stale is not None:
                blocks, offsets = groups.stale
                layer_cache[:, blocks, :, offsets] = 0
            blocks, offsets = groups.slots
            keys[blocks, :, offsets] = k
            values[blocks, :, offsets] = v
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for group in groups.decode:
            self._decode(q, keys, values, group, shape, sinks, out)
        for row in groups.prefill:
            self._prefill(q, k, v, keys, values, row, shape, sinks, out)
        return out

    def forward_rotary(
        self,
        qkv: Tensor,
        rotary: RotaryHeads,
        layer_cache: Tensor,
        metadata: Metadata,
        shape: AttentionShape,
        sinks: Tensor | None = None,
    ) -> Tensor:
        turned, query_norm, key_norm = self._heads + self._shape.kv_heads, rotary.query_norm, rotary.key_norm
        if qkv.shape[1] == self._heads:
            q = prepare(qkv, query_norm, rotary)
            return self.forward(q, None, None, layer_cache, metadata, shape, sinks)
        if query_norm is None or key_norm is None:
            q, k = rotate(qkv[:, :turned], rotary.cos, rotary.sin).tensor_split([self._heads], 1)
        else:
            q = prepare(qkv[:, : self._heads], query_norm, rotary)
            k = prepare(qkv[:, self._heads : turned], key_norm, rotary)
        return self.forward(q, k, qkv[:, turned:], layer_cache, metadata, shape, sinks)

    def _stale(self, metadata: AttentionMetadata) -> Slots | None:
        """Return the cache positions after the last token of each row that enters its last block in
        this step, or None without any.
        """
        size = self._shape.block_size
        ends = metadata.context_lens
        starts = ends - np.diff(metadata.query_start)
        rows = np.nonzero((ends % size != 0) & (ends // size * size >= starts))[0]
        if rows.size == 0:
            return None
        blocks = metadata.block_tables[rows, ends[rows] // size].astype(np.int64)
        places, offsets = np.nonzero(np.arange(size) >= ends[rows, None] % size)
        return torch.from_numpy(blocks[places]).to(self._device), torch.from_numpy(offsets).to(self._device)

    def _gather(self, cache: Tensor, blocks: Tensor, rows: int) -> Tensor:
        """Return the gathered blocks as [kv_heads * rows, L, d]."""
        s, head = self._shape, self._shape.block_size * self._shape.head_dim
        places = ((s.num_blocks - 1) * s.stride + (s.kv_heads - 1) * head) // self._step + 1
        flat = cache.as_strided((places, head), (self._step, 1))
        return flat.index_select(0, blocks).view(s.kv_heads * rows, -1, s.head_dim)

    def _decode(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        group: DecodeGroup,
        shape: AttentionShape,
        sinks: Tensor | None,
        out: Tensor,
    ) -> None:
        s, rows = self._shape, group.tokens.shape[0]
        query = q[group.tokens].view(rows, s.kv_heads, self._per_kv, s.head_dim).transpose(0, 1)
        scores = torch.bmm(
            query.reshape(-1, self._per_kv, s.head_dim), self._gather(keys, group.blocks, rows).transpose(1, 2)
        )
        scores = _scaled(scores, shape).view(s.kv_heads, rows, self._per_kv, -1).add_(group.mask)
        sinks = None if sinks is None else sinks.view(s.kv_heads, 1, self._per_kv, 1)
        weights = _softmax(scores, sinks).to(q.dtype).reshape(s.kv_heads * rows, self._per_kv, -1)
        attended = torch.bmm(weights, self._gather(values, group.blocks, rows)).view(
            s.kv_heads, rows, self._per_kv, s.head_dim
        )
        out[group.tokens] = attended.transpose(0, 1).reshape(rows, -1, s.head_dim)

    def _prefill(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        keys: Tensor,
        values: Tensor,
        row: PrefillRow,
        shape: AttentionShape,
        sinks: Tensor | None,
        out: Tensor,
    ) -> None:
        tokens = slice(row.first, row.last)
        if row.blocks is None:
            assert k is not None
            assert v is not None
            key, value = k[tokens].transpose(0, 1), v[tokens].transpose(0, 1)
        else:
            key = self._gather(keys, row.blocks, 1)[:, : row.context]
            value = self._gather(values, row.blocks, 1)[:, : row.context]
        if shape.soft_cap is not None or sinks is not None:
            self._prefill_in_parts(q[tokens], key, value, row, shape, sinks, out[tokens])
            return
        out[tokens] = F.scaled_dot_product_attention(
            q[tokens].transpose(0, 1)[None],
            key[None],
            value[None],
            attn_mask=row.mask,
            is_causal=row.causal and row.mask is None,
            scale=shape.scale,
            enable_gqa=self._per_kv > 1,
        )[0].transpose(0, 1)

    def _prefill_in_parts(
        self,
        q: Tensor,
        key: Tensor,
        value: Tensor,
        row: PrefillRow,
        shape: AttentionShape,
        sinks: Tensor | None,
        out: Tensor,
    ) -> None:
        """Attend where torch's own function does not apply, with few scores at once."""
        count, context = len(q), key.shape[1]
        size = max(1, self._group_bytes // (self._heads * context * torch.float32.itemsize))
        sinks = None if sinks is None else sinks.view(-1, self._per_kv, 1, 1)
        by_head = q.view(count, -1, self._per_kv, q.shape[-1]).permute(1, 2, 0, 3)
        for first in range(0, count, size):
            query = by_head[:, :, first : first + size]
            scores = _scaled(torch.bmm(query.flatten(1, 2), key.transpose(1, 2)), shape)
            scores = scores.view(*query.shape[:3], context)
            _hide(scores, row, first)
            weights = _softmax(scores, sinks).to(q.dtype).flatten(1, 2)
            attended = torch.bmm(weights, value).view(query.shape).permute(2, 0, 1, 3)
            out[first : first + size] = attended.flatten(1, 2)

    def _groups(
        self, metadata: AttentionMetadata, pattern: AttentionPattern, bias: Tensor | None, stores: bool
    ) -> Groups:
        counts = np.diff(metadata.query_start)
        alone = (counts == 1) & (pattern.causal and bias is None)  # else a single token is a whole text
        rows = np.nonzero(alone)[0]
        first = self._first_visible(metadata.context_lens[rows] - 1, pattern)
        spans = metadata.context_lens[rows] - first
        order = np.argsort(spans, kind="stable")
        rows, first, spans = rows[order], first[order], spans[order]
        decode = [self._decode_group(metadata, rows[a:b], first[a:b], pattern) for a, b in self._cuts(spans)]
        prefill = [
            self._prefill_row(metadata, int(row), pattern, bias, stores) for row in np.nonzero(~alone & (counts > 0))[0]
        ]
        slots, size = metadata.slot_mapping, self._shape.block_size
        return Groups(decode, prefill, (slots // size, slots % size), self._stale(metadata), bias, stores)

    def _first_visible(self, positions: NDArray[np.int32], pattern: AttentionPattern) -> NDArray[np.int32]:
        """Return the first token of the first block visible to a query at `positions`."""
        return _oldest(positions, pattern) // self._shape.block_size * self._shape.block_size

    def _cuts(self, spans: NDArray[np.int32]) -> list[tuple[int, int]]:
        """Split ascending spans into runs whose padded keys stay under the group size."""
        cuts: list[tuple[int, int]] = []
        start = 0
        for end in range(1, len(spans) + 1):
            if end == len(spans) or (end + 1 - start) * int(spans[end]) * self._row_bytes > self._group_bytes:
                cuts.append((start, end))
                start = end
        return cuts

    def _decode_group(
        self, metadata: AttentionMetadata, rows: NDArray[np.intp], first: NDArray[np.int32], pattern: AttentionPattern
    ) -> DecodeGroup:
        size = self._shape.block_size
        contexts = metadata.context_lens[rows]
        num_blocks = int(-(-(contexts - first).max() // size))
        # Columns past a row's end repeat its last block: other blocks may contain NaN or infinity,
        # which a mask does not exclude.
        columns = np.minimum(first[:, None] // size + np.arange(num_blocks), (contexts[:, None] - 1) // size)
        positions = first[:, None] + np.arange(num_blocks * size)
        visible = positions < contexts[:, None]
        if pattern.before is not None:
            visible &= positions >= _oldest(contexts - 1, pattern)[:, None]
        mask = np.where(visible, np.float32(0), np.float32(-np.inf))[:, None]
        tokens = torch.from_numpy(metadata.query_start[rows].astype(np.int64))
        flat = self._flat_blocks(metadata.block_tables[rows[:, None], columns])
        return DecodeGroup(tokens.to(self._device), flat, torch.from_numpy(mask).to(self._device))

    def _prefill_row(
        self, metadata: AttentionMetadata, row: int, pattern: AttentionPattern, bias: Tensor | None, stores: bool
    ) -> PrefillRow:
        first_token, last_token = int(metadata.query_start[row]), int(metadata.query_start[row + 1])
        count, context = last_token - first_token, int(metadata.context_lens[row])
        start = context - count
        limited = pattern.before is not None and context > pattern.before + 1
        if stores and start == 0 and not limited and bias is None:
            return PrefillRow(first_token, last_token, None, context, None, pattern.causal)
        first = int(self._first_visible(np.array([start], dtype=np.int32), pattern)[0])
        blocks = None
        if start > 0 or not stores:
            size = self._shape.block_size
            blocks = self._flat_blocks(metadata.block_tables[row, first // size : -(-context // size)])
        keys, queries = (torch.arange(begin, context, device=self._device) for begin in (first, start))
        mask = self._mask(keys, queries[:, None], pattern, bias)
        return PrefillRow(first_token, last_token, blocks, context - first, mask, pattern.causal)

    def _mask(self, keys: Tensor, queries: Tensor, pattern: AttentionPattern, bias: Tensor | None) -> Tensor:
        """Return `PrefillRow.mask` for keys at the positions int64 [L] and queries at [n, 1]."""
        ahead = keys - queries
        mask = torch.ones_like(ahead, dtype=torch.bool)
        if pattern.chunk is not None:
            mask &= -ahead <= queries % pattern.chunk
        elif pattern.before is not None:
            mask &= ahead >= -pattern.before
        if pattern.after is not None:
            mask &= ahead <= pattern.after
        if bias is None:
            return mask
        reach = bias.shape[1] // 2
        added = bias[:, ahead.clamp(-reach, reach) + reach]
        return added.masked_fill_(~mask, -torch.inf).to(self._dtype)

    def _flat_blocks(self, blocks: NDArray[np.int32]) -> Tensor:
        """Return the places of the blocks' heads, head by head, in steps of `_step`."""
        places = blocks.astype(np.int64).reshape(1, -1) * (self._shape.stride // self._step)
        flat = torch.from_numpy(places) + self._head_offset
        return flat.view(-1).to(self._device)


def _oldest(positions: NDArray[np.int32], pattern: AttentionPattern) -> NDArray[np.int32]:
    """Return the first token visible to a query at each position."""
    if pattern.chunk is not None:
        return positions - positions % pattern.chunk
    if pattern.before is None:
        return np.zeros_like(positions)
    return np.maximum(positions - pattern.before, 0)


def _scaled(products: Tensor, shape: AttentionShape) -> Tensor:
    """Return the scores of products of queries and keys, in float32."""
    scores = products.float().mul_(shape.scale)
    return scores if shape.soft_cap is None else scores.div_(shape.soft_cap).tanh_().mul_(shape.soft_cap)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    if sinks is None:
        return scores.softmax(-1)
    return torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), -1).softmax(-1)[..., :-1]


def _hide(scores: Tensor, row: PrefillRow, first: int) -> None:
    """Mask the scores [kv_heads, heads of each, n, L] of a row's queries from `first` on."""
    count, context = scores.shape[2:]
    if row.mask is not None and row.mask.dtype != torch.bool:
        scores.flatten(0, 1).add_(row.mask[:, first : first + count])
    elif row.mask is not None:
        scores.masked_fill_(~row.mask[first : first + count], -torch.inf)
    elif row.causal:
        later = torch.ones((count, context), dtype=torch.bool, device=scores.device).triu(first + 1)
        scores.masked_fill_(later, -torch.inf)


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros whose pages the system allocates on first access. Raises MemoryError."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.zeros(size + _ALIGNMENT, np.uint8)  # calloc; torch.zeros would write every page
    start = -raw.ctypes.data % _ALIGNMENT
    return torch.from_numpy(raw[start : start + size]).view(dtype).view(shape)
