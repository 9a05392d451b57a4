"""Run a model's layers in one call of `source/stack.c`; their products use packed matrices."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from workers.engine.attention.context import CachedLayer, StepAttention
from workers.engine.layers.base import AttentionContext, AttentionPattern, DecoderLayer, Norm, Rotation
from workers.engine.layers.stack import LayerStack
from workers.engine.native.attention import CpuAttention, HeadRotation, head_rotation
from workers.engine.native.checks import norms_match_torch
from workers.engine.native.library import load
from workers.engine.native.memory import zeros_together
from workers.engine.native.norms import NormWeights, head_norm, norm_weights
from workers.engine.native.packed import PackedMatrix

PARTS = ("matrix", "attention", "norms and elementwise")
# Tokens that go through an MLP together, so that its intermediate result stays small
_MLP_ROWS = 512
_LEAST_ROOM = 64  # tokens


class _Layer(ctypes.Structure):
    """`decoder_layer` of stack.c."""

    _fields_ = [
        *((name, NormWeights) for name in ("attention_norm", "mlp_norm", "query_norm", "key_norm")),
        *((name, ctypes.c_void_p) for name in ("qkv", "output", "up", "down", "cache", "sinks")),
        *((name, ctypes.c_float) for name in ("scale", "soft_cap")),
        *((name, ctypes.c_int32) for name in ("step", "rotation")),
    ]


class _Stack(ctypes.Structure):
    """`decoder_stack` of stack.c."""

    _fields_ = [
        ("layers", ctypes.POINTER(_Layer)),
        ("norm", NormWeights),
        *(
            (name, ctypes.c_int32)
            for name in ("post_norm", "num_layers", "hidden", "queries", "keys", "mlp_rows", "floats", "threads")
        ),
        ("interrupted", ctypes.c_void_p),
        ("seconds", ctypes.c_double * len(PARTS)),
    ]


class NativeStack(LayerStack):
    """Layers with buffers that are reused by steps; attention of other backends runs per layer."""

    def __init__(self, layers: Sequence[DecoderLayer], norm: Norm | None, post_norm: bool = False) -> None:
        super().__init__(layers, norm, post_norm)
        shape, output = layers[0].attention.shape, _packed(layers[0].attention.output)
        queries, keys, self._hidden = shape.queries, shape.keys, output.columns
        self._narrow, self._qkv = max(self._hidden, queries), queries + 2 * keys
        self._mlp = max(_packed(layer.mlp.up).columns for layer in layers)
        self._c_layers = (_Layer * len(layers))(*map(_c_layer, layers))
        self._dtype = output.dtype
        sizes = len(layers), self._hidden, queries, keys, _MLP_ROWS, self._dtype == torch.float32
        self._c_stack = _Stack(self._c_layers, _c_norm(norm), post_norm, *sizes)
        self._pointer = ctypes.addressof(self._c_stack)
        self._steps: list[tuple[CpuAttention, int, AttentionPattern]] = []
        self._cached: Sequence[CachedLayer] = []
        self._room = 0  # capacity of the buffers in tokens
        self._run = _run_stack()

    @property
    def seconds(self) -> dict[str, float]:
        """Return the seconds spent so far, by part."""
        return dict(zip(PARTS, self._c_stack.seconds, strict=True))

    def __call__(
        self, hidden: Tensor, rotations: Sequence[Rotation], attend: AttentionContext, inputs: Tensor | None = None
    ) -> Tensor:
        if not isinstance(attend, StepAttention) or not isinstance(attend.layers[0].attention, CpuAttention):
            return super().__call__(hidden, rotations, attend, inputs)
        if attend.layers is not self._cached:
            self._take_caches(attend.layers)
        tokens, hidden = len(hidden), hidden.contiguous()
        if tokens > self._room:
            self._make_room(tokens)
        steps = [
            attention.prepared(attend.metadata[table], pattern, attend.bias, self._qkv).pointer
            for attention, table, pattern in self._steps
        ]
        turns = (HeadRotation * len(rotations))(*(head_rotation(*rotation) for rotation in rotations))
        needed = None if attend.needed is None else attend.needed.contiguous()
        assert needed is None or needed.dtype == torch.int64
        self._c_stack.threads = torch.get_num_threads()
        self._c_stack.interrupted = attend.interruption.address if attend.interruption is not None else None
        failed = self._run(
            self._pointer,
            (ctypes.c_void_p * len(steps))(*steps),
            turns if rotations else None,
            None if needed is None else needed.data_ptr(),
            -1 if needed is None else len(needed),
            tokens,
            hidden.data_ptr(),
            *self._buffers,
        )
        if failed:
            raise MemoryError(f"layers of {tokens} tokens in int8")
        if attend.interruption is not None:
            attend.interruption.check()
        return self._result[: tokens * self._hidden].view(tokens, self._hidden)

    def _take_caches(self, cached: Sequence[CachedLayer]) -> None:
        of_layers = [(cast(CpuAttention, its.attention), its.table, its.shape.pattern) for its in cached]
        self._cached, self._steps = cached, list(dict.fromkeys(of_layers))
        for layer, its, step in zip(self._c_layers, cached, of_layers, strict=True):
            layer.cache, layer.scale = its.cache.data_ptr(), its.shape.scale
            layer.soft_cap, layer.step = its.shape.soft_cap or 0.0, self._steps.index(step)

    def _make_room(self, tokens: int) -> None:
        """Allocate buffers for more than `tokens`, so that slow growth rarely reallocates them."""
        self._room, tokens = 0, max(_LEAST_ROOM, 1 << (tokens - 1).bit_length())
        self._result = torch.empty(0)
        self._held: list[Tensor] = []  # frees the old buffers first
        sizes = (
            tokens * self._hidden,
            tokens * self._narrow,
            max(tokens * self._qkv, min(tokens, _MLP_ROWS) * self._mlp),
        )
        self._held = zeros_together(sizes, self._dtype)
        self._result, self._buffers, self._room = self._held[1], [buffer.data_ptr() for buffer in self._held], tokens


def can_stack(layers: Sequence[DecoderLayer], norm: Norm | None, post_norm: bool) -> bool:
    """Return whether products use packed matrices, and norms are where stack.c has them and equal
    torch's.
    """
    packed = bool(layers) and all(isinstance(matrix, PackedMatrix) for layer in layers for matrix in _matrices(layer))
    normed = all(layer.attention_norm is not None for layer in layers[0 if post_norm else 1 :])
    alike = len({_heads(layer) for layer in layers}) == 1 and all(map(_is_plain, layers))
    placed = (norm is None) is post_norm
    return packed and normed and alike and placed and norms_match_torch(_packed(layers[0].mlp.up).dtype)


def _is_plain(layer: DecoderLayer) -> bool:
    """Return whether a layer has its parts one after the other, keys of its own, no norms of
    results or values, and nothing after its MLP.
    """
    results = layer.attention_result_norm, layer.mlp_result_norm
    own_keys = layer.attention.shape.reads is None and layer.attention.row_norm is None
    plain = layer.mlp_norm is not None and results == (None, None) and not layer.parallel
    unchanged = layer.layer_input is None and layer.scalar is None and layer.attention.value_norm is None
    return plain and own_keys and unchanged and layer.factor == 1.0


def _heads(layer: DecoderLayer) -> tuple[int, int, int]:
    shape = layer.attention.shape
    return shape.heads, shape.kv_heads, shape.head_dim


def _matrices(layer: DecoderLayer) -> tuple[object, ...]:
    return layer.attention.qkv, layer.attention.output, layer.mlp.up, layer.mlp.down


def _packed(projection: object) -> PackedMatrix:
    assert isinstance(projection, PackedMatrix)
    return projection


def _c_norm(norm: Norm | None) -> NormWeights:
    return NormWeights() if norm is None else norm_weights(norm.weight, norm.bias, norm.eps)


def _c_layer(layer: DecoderLayer) -> _Layer:
    matrices, part = [_packed(matrix).pointer for matrix in _matrices(layer)], layer.attention
    norms = [_c_norm(norm) for norm in (layer.attention_norm, layer.mlp_norm)]
    norms += [head_norm(norm, part.norm_after_rotation) for norm in (part.query_norm, part.key_norm)]
    sinks = None if part.sinks is None else part.sinks.data_ptr()
    return _Layer(*norms, *matrices, None, sinks, rotation=part.rotation)


@functools.cache
def _run_stack() -> ctypes._FuncPointer:
    function, pointer = load().run_stack, ctypes.c_void_p
    function.argtypes = (*(pointer,) * 4, *(ctypes.c_ssize_t,) * 2, *(pointer,) * 4)
    return function
