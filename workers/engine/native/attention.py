"""Attention by the CPU kernels of `native/source/attention.c`.

One call for each layer computes all rows, with norms, rotation and the writes to the cache. Data
that depend only on the step are prepared once for all layers.

A layer's cache is [num_blocks, kv_heads, 2 * block_size * d], in an order of the kernels' own
within a head's block.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from workers.engine.attention.base import AttentionMetadata, CacheShape, Metadata
from workers.engine.layers.base import AttentionPattern, AttentionShape, RotaryHeads
from workers.engine.native.library import load
from workers.engine.native.memory import huge_zeros
from workers.engine.native.norms import NormWeights, head_norm

_Strides = ctypes.c_ssize_t * 2
# Dtypes of queries, keys and values, and of the cache, with their numbers in lanes.h
_MODES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.bfloat16),
]
_ALL = 1 << 30  # tokens; no row has more
_PANEL = 16  # tokens whose keys are computed with together


class _Step(ctypes.Structure):
    """`attention_step` of attention.h."""

    _fields_ = [
        *(
            (name, ctypes.c_int32)
            for name in ("mode", "heads", "kv_heads", "head_dim", "block_size", "before", "after", "chunk")
        ),
        *(
            (name, ctypes.c_int32)
            for name in ("num_tokens", "num_rows", "max_blocks", "shares", "together", "any_ahead")
        ),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "slots",
                "query_start",
                "contexts",
                "tables",
                "starts",
                "ahead",
                "partials_at",
                "partials",
                "scratch",
            )
        ),
        ("scratch_size", ctypes.c_ssize_t),
        *((name, _Strides) for name in ("query_stride", "key_stride", "value_stride")),
        ("bias", ctypes.c_void_p),
        ("bias_stride", ctypes.c_ssize_t),
        ("block_stride", ctypes.c_ssize_t),
    ]


class HeadRotation(ctypes.Structure):
    """`head_rotation` of kernels.h."""

    _fields_ = [*((name, ctypes.c_void_p) for name in ("cos", "sin")), ("stride", ctypes.c_ssize_t)]


def head_rotation(cos: Tensor, sin: Tensor) -> HeadRotation:
    """Return the rotation of `Rotary.cos_sin`'s pair, which must outlive the result."""
    assert cos.stride(-1) == sin.stride(-1) == 1
    assert cos.stride(0) == sin.stride(0)
    return HeadRotation(cos.data_ptr(), sin.data_ptr(), cos.stride(0))


class PreparedStep:
    """A step in the kernels' form, for layers of one attention, pattern and bias."""

    __slots__ = ("_held", "_others", "bias", "pointer", "step", "strides")

    def __init__(self, step: _Step, bias: Tensor | None, held: tuple[object, ...]) -> None:
        self.step, self.bias, self.pointer = step, bias, ctypes.addressof(step)
        self._held = held  # objects that the step points to
        self.strides: tuple[tuple[int, ...], ...] = ()
        self._others: dict[tuple[tuple[int, ...], ...], PreparedStep] = {}

    def with_strides(self, *strides: tuple[int, ...]) -> PreparedStep:
        """Return this step for queries, keys and values of these strides."""
        if not self.strides:
            self._set_strides(strides)
        if strides == self.strides:
            return self
        if strides not in self._others:
            self._others[strides] = PreparedStep(_Step.from_buffer_copy(self.step), self.bias, self._held)
        return self._others[strides].with_strides(*strides)

    def _set_strides(self, strides: tuple[tuple[int, ...], ...]) -> None:
        assert all(of[2] == 1 for of in strides)
        self.step.query_stride[:], self.step.key_stride[:], self.step.value_stride[:] = (of[:2] for of in strides)
        self.strides = strides


class CpuAttention:
    lazy_cache = True

    def __init__(self, shape: CacheShape, num_heads: int, dtype: torch.dtype) -> None:
        """Load the kernels. Raise NativeUnavailable."""
        self._shape, self._heads, self._dtype = shape, num_heads, dtype
        self._cache_dtype = shape.stored_dtype(dtype)
        self._mode = _MODES.index((dtype, self._cache_dtype))
        functions = _functions()
        self._attend, self._plan = functions.attend_layer, functions.attention_plan
        self._scratch_size: int = functions.attention_scratch(
            self._mode, shape.kv_heads, shape.head_dim, shape.block_size
        )
        self._scratch = torch.empty(0, dtype=torch.float32)
        self._partials = torch.empty(0, dtype=torch.float32)

    def new_cache(self, num_layers: int) -> list[Tensor]:
        size = self._shape.num_blocks, 2 * self._shape.stride
        return [self.view(huge_zeros(size, self._cache_dtype)) for _ in range(num_layers)]

    def view(self, cache: Tensor) -> Tensor:
        s, head = self._shape, 2 * self._shape.block_size * self._shape.head_dim
        return cache.as_strided((s.num_blocks, s.kv_heads, head), (2 * s.stride, head, 1))

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
        prepared = self._prepared(metadata, shape.pattern, bias)
        return self._attend_rows(prepared, None, q, k, v, layer_cache, shape, sinks)

    def forward_rotary(
        self,
        qkv: Tensor,
        rotary: RotaryHeads,
        layer_cache: Tensor,
        metadata: Metadata,
        shape: AttentionShape,
        sinks: Tensor | None = None,
    ) -> Tensor:
        prepared, rotation = self._prepared(metadata, shape.pattern, None), head_rotation(rotary.cos, rotary.sin)
        k: Tensor | None
        v: Tensor | None
        q, k, v = qkv.tensor_split([self._heads, self._heads + self._shape.kv_heads], 1)
        if qkv.shape[1] == self._heads:
            k = v = None
        norms = [
            None if norm is None else head_norm(norm, rotary.norm_after_rotation)
            for norm in (rotary.query_norm, rotary.key_norm)
        ]
        return self._attend_rows(prepared, rotation, q, k, v, layer_cache, shape, sinks, norms)

    def prepared(self, metadata: Metadata, pattern: AttentionPattern, bias: Tensor | None, width: int) -> PreparedStep:
        """Prepare a step whose queries, keys and values are side by side in rows of `width`."""
        return self._prepared(metadata, pattern, bias).with_strides(*((width, self._shape.head_dim, 1),) * 3)

    def _attend_rows(
        self,
        prepared: PreparedStep,
        rotation: HeadRotation | None,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer_cache: Tensor,
        shape: AttentionShape,
        sinks: Tensor | None,
        norms: Sequence[NormWeights | None] = (None, None),
    ) -> Tensor:
        """Attend; `norms`: of the queries and the keys."""
        stored = (q if k is None else k), (q if v is None else v)
        prepared = prepared.with_strides(q.stride(), *(x.stride() for x in stored))
        out = torch.empty(q.shape, dtype=self._dtype)
        self._attend(
            prepared.pointer,
            None if rotation is None else ctypes.addressof(rotation),
            layer_cache.data_ptr(),
            q.data_ptr(),
            None if k is None else k.data_ptr(),
            None if v is None else v.data_ptr(),
            out.data_ptr(),
            *(None if norm is None else ctypes.addressof(norm) for norm in norms),
            shape.scale,
            shape.soft_cap or 0.0,
            None if sinks is None else sinks.data_ptr(),
        )
        return out

    def _prepared(self, metadata: Metadata, pattern: AttentionPattern, bias: Tensor | None) -> PreparedStep:
        assert isinstance(metadata, AttentionMetadata)
        prepared: PreparedStep | None = metadata.prepared.get((self, pattern))
        if prepared is None or prepared.bias is not bias:
            prepared = metadata.prepared[self, pattern] = self._prepare(metadata, pattern, bias)
        return prepared

    def _prepare(self, metadata: AttentionMetadata, pattern: AttentionPattern, bias: Tensor | None) -> PreparedStep:
        s, threads = self._shape, torch.get_num_threads()
        slots = metadata.slot_mapping.contiguous()
        arrays = [
            np.ascontiguousarray(x, np.int32)
            for x in (metadata.query_start, metadata.context_lens, metadata.block_tables)
        ]
        rows = len(arrays[1])
        starts, ahead, partials_at = (
            np.empty((threads + 1, 3), np.int32),
            np.empty(rows, np.int32),
            np.empty(rows, np.int64),
        )
        if self._scratch.numel() < threads * self._scratch_size:
            self._scratch = torch.empty(threads * self._scratch_size, dtype=torch.float32)
        step = _Step(
            *(self._mode, self._heads, s.kv_heads, s.head_dim, s.block_size),
            *(_ALL if reach is None else reach for reach in (pattern.before, pattern.after)),
            pattern.chunk or 0,
            *(len(slots), rows, arrays[2].shape[1], threads, 1, 0),
            *(slots.data_ptr(), *(x.ctypes.data for x in (*arrays, starts, ahead)), partials_at.ctypes.data),
            *(None, self._scratch.data_ptr(), self._scratch_size),
            block_stride=2 * s.stride * self._cache_dtype.itemsize // 4,
        )
        reaching = None
        if bias is not None:
            reaching, reach = _reaching(bias, int(arrays[1].max()) + _PANEL)
            step.bias, step.bias_stride = reaching.data_ptr() + reaching.itemsize * reach, reaching.shape[1]
        size: int = self._plan(ctypes.addressof(step))
        if size > self._partials.numel():
            self._partials = torch.empty(size, dtype=torch.float32)
        step.partials = self._partials.data_ptr() if size else None
        held = (slots, *arrays, starts, ahead, partials_at, self._scratch, self._partials, reaching)
        return PreparedStep(step, bias, held)


def _reaching(bias: Tensor, distance: int) -> tuple[Tensor, int]:
    """Return the bias extended to a reach of at least `distance`, and its reach."""
    reach = bias.shape[1] // 2
    missing = max(0, distance - reach)
    return F.pad(bias.float()[None], (missing, missing), mode="replicate")[0].contiguous(), reach + missing


@functools.cache
def _functions() -> ctypes.CDLL:
    library, pointer, number = load(), ctypes.c_void_p, ctypes.c_int32
    library.attention_scratch.argtypes = (number, number, number, number)
    library.attention_plan.argtypes = (pointer,)
    library.attention_scratch.restype = library.attention_plan.restype = ctypes.c_ssize_t
    library.attend_layer.argtypes = (*(pointer,) * 9, *(ctypes.c_float,) * 2, pointer)
    library.attend_layer.restype = None
    return library
