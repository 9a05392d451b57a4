"""Paged attention by Triton kernels.

The kernels read all lengths from the device's memory, so that a step can be recorded in a CUDA
graph. The cache of a layer is [2, num_blocks, kv_heads, block_size, d]. Old data after a row's end
are never multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.engine.attention.base import CacheShape, DeviceMetadata, Metadata
from workers.engine.kernels import attention as kernels
from workers.engine.kernels.rotary import rotate_and_write, write
from workers.engine.kernels.tuning import TileChoice
from workers.engine.layers.base import AttentionPattern, AttentionShape, RotaryHeads

_WAVES = {"decode": 2, "prefill": 1}  # pieces of the work per concurrent program
_MIN_PIECE = 256  # least tokens of context for a separate program
# Most tokens of context that one program always computes if there are many programs; it computes a
# longer context only within its share
_LONG = 4096
_MANY = 4  # programs per concurrent program that count as many
_COMBINED = 16  # tile rows of one program of `combine`


@dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces of a step's work on the device, for all layers of one pattern."""

    choice: TileChoice
    block_q: int  # queries of one piece
    records: Tensor  # int32 [pieces, kernels.RECORD]
    leaders: Tensor  # int32 [share], empty if no row is split
    # Float32 [2 * share, kv_heads, block_q * group, d], used by the layers in turn
    partials: Tensor
    partial_sums: Tensor  # float32 [2 * share, kv_heads, block_q * group]


class TritonAttention:
    lazy_cache = False

    def __init__(
        self,
        shape: CacheShape,
        num_heads: int,
        dtype: torch.dtype,
        device: torch.device,
        choices: Mapping[str, TileChoice],
    ) -> None:
        """Use the tiles in `choices` for "decode" and "prefill" steps."""
        self._shape, self._heads, self._device = shape, num_heads, device
        self._cache_dtype = shape.stored_dtype(dtype)
        self._group = num_heads // shape.kv_heads
        self._block_d = max(16, _power_of_two(shape.head_dim))
        self._choices = choices
        self._parallel = (
            2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
        )
        self._dot = kernels.dot_type(dtype, self._cache_dtype)

    def new_cache(self, num_layers: int) -> list[Tensor]:
        size = (2, self._shape.num_blocks, self._shape.stride)
        pages = (torch.zeros(size, dtype=self._cache_dtype, device=self._device) for _ in range(num_layers))
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
        assert isinstance(metadata, DeviceMetadata)
        if k is not None and v is not None:
            write(k, v, layer_cache, metadata.slot_mapping)
        return self.attend(q, layer_cache, metadata, shape, sinks, bias)

    def forward_rotary(
        self,
        qkv: Tensor,
        rotary: RotaryHeads,
        layer_cache: Tensor,
        metadata: Metadata,
        shape: AttentionShape,
        sinks: Tensor | None = None,
    ) -> Tensor:
        assert isinstance(metadata, DeviceMetadata)
        q = rotate_and_write(qkv, self._heads, rotary, layer_cache, metadata.slot_mapping)
        return self.attend(q, layer_cache, metadata, shape, sinks)

    def attend(
        self,
        q: Tensor,
        layer_cache: Tensor,
        metadata: DeviceMetadata,
        shape: AttentionShape,
        sinks: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Compute attention; keys and values must already be cached."""
        s = self._shape
        if q.stride()[1:] != (s.head_dim, 1):
            q = q.contiguous()
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        pieces = self._pieces(metadata, q.shape[0], shape.pattern)
        prefill = metadata.max_query > 1
        grid = (pieces.records.shape[0], s.kv_heads)
        kernels.attend[grid if prefill else grid[::-1]](
            q,
            layer_cache,
            metadata.block_tables,
            pieces.records,
            out,
            pieces.partials,
            pieces.partial_sums,
            None if bias is None else bias.contiguous(),
            sinks,
            shape.scale * kernels.LOG2_E.value,
            None if shape.soft_cap is None else shape.soft_cap / shape.scale,
            s.num_blocks,
            q.stride(0),
            metadata.block_tables.stride(0),
            KV_HEADS=s.kv_heads,
            GROUP=self._group,
            HEAD_DIM=s.head_dim,
            BLOCK_SIZE=s.block_size,
            BLOCK_STRIDE=s.stride,
            **_reaches(shape.pattern),
            REACH=0 if bias is None else bias.shape[1] // 2,
            BLOCK_M=pieces.choice.block_m,
            BLOCK_Q=pieces.block_q,
            BLOCK_D=self._block_d,
            TILE=pieces.choice.tile,
            PREFILL=prefill,
            DOT=self._dot,
            num_warps=pieces.choice.warps,
            num_stages=pieces.choice.stages,
            # Fused multiply-add; later versions of Triton do not use it by default
            enable_fp_fusion=True,
        )
        if pieces.leaders.shape[0]:
            kernels.combine[(pieces.leaders.shape[0], s.kv_heads, -(-pieces.block_q * self._group // _COMBINED))](
                pieces.records,
                pieces.leaders,
                out,
                pieces.partials,
                pieces.partial_sums,
                sinks,
                KV_HEADS=s.kv_heads,
                GROUP=self._group,
                HEAD_DIM=s.head_dim,
                BLOCK_Q=pieces.block_q,
                BLOCK_D=self._block_d,
                BLOCK_M=_COMBINED,
            )
        return out

    def _pieces(self, metadata: DeviceMetadata, tokens: int, pattern: AttentionPattern) -> Pieces:
        # A plan from before a recording would not be repeated when the graph is replayed.
        key = (self, pattern, metadata.query_start.is_cuda and torch.cuda.is_current_stream_capturing())
        if key not in metadata.prepared:
            metadata.prepared[key] = self._plan(metadata, tokens, pattern)
        pieces: Pieces = metadata.prepared[key]
        return pieces

    def _plan(self, metadata: DeviceMetadata, tokens: int, pattern: AttentionPattern) -> Pieces:
        kind = "decode" if metadata.max_query == 1 else "prefill"
        choice, rows = self._choices[kind], metadata.context_lens.shape[0]
        block_q = 1 if kind == "decode" else choice.block_m // self._group
        share = self._share(kind, max(rows, tokens // block_q), metadata.max_context)
        records = self._empty((tokens // block_q if kind == "prefill" else 0) + rows + share, kernels.RECORD.value)
        leaders = self._empty(share)
        # Split blocks are longer than a share, so they make less than 2 * share pieces.
        sums = self._empty(2 * share, self._shape.kv_heads, block_q * self._group, dtype=torch.float32)
        partials = self._empty(*sums.shape, self._shape.head_dim, dtype=torch.float32)
        levels = max(8, (rows - 1).bit_length())  # few different values, since each is compiled
        kernels.plan[(1,)](
            metadata.query_start,
            metadata.context_lens,
            metadata.slots,
            records,
            leaders,
            self._empty(4, 1 << levels),
            rows,
            records.shape[0],
            share,
            **_reaches(pattern),
            BLOCK_Q=block_q,
            TILE=choice.tile,
            MIN_TILES=max(1, _MIN_PIECE // choice.tile),
            LEVELS=levels,
            PIECES=256,
        )
        return Pieces(choice, block_q, records, leaders, partials, sums)

    def _share(self, kind: str, least: int, longest: int) -> int:
        """Return the number of even shares for work of at least `least` pieces; 0 for no split."""
        enough = least * self._shape.kv_heads >= _MANY * self._parallel
        if longest <= (_LONG if enough else _MIN_PIECE):
            return 0
        return -(-_WAVES[kind] * self._parallel // self._shape.kv_heads)

    def _empty(self, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)


def _reaches(pattern: AttentionPattern) -> dict[str, int]:
    return {
        "BEFORE": -1 if pattern.before is None else pattern.before,
        "AFTER": -1 if pattern.after is None else pattern.after,
        "CHUNK": pattern.chunk or 0,
    }


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
