"""Run a model's layers in as few calls of `source/stack.c` as possible; their products use packed
matrices.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from itertools import pairwise

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
_Runner = Callable[[int, int, Tensor, Tensor | None], tuple[Tensor, Tensor]]


class _Layer(ctypes.Structure):
    """`decoder_layer` of stack.c."""

    _fields_ = [
        *((name, NormWeights) for name in ("attention_norm", "mlp_norm", "attention_result_norm", "mlp_result_norm")),
        *((name, NormWeights) for name in ("query_norm", "key_norm", "query_row_norm", "key_row_norm")),
        *((name, ctypes.c_void_p) for name in ("qkv", "output", "up", "down", "cache", "sinks")),
        *((name, ctypes.c_float) for name in ("scale", "soft_cap", "factor")),
        *((name, ctypes.c_int32) for name in ("step", "rotation", "queries", "keys", "parallel")),
    ]


class _Stack(ctypes.Structure):
    """`decoder_stack` of stack.c."""

    _fields_ = [
        ("layers", ctypes.POINTER(_Layer)),
        ("norm", NormWeights),
        *((name, ctypes.c_int32) for name in ("post_norm", "num_layers", "hidden", "mlp_rows", "floats", "threads")),
        ("interrupted", ctypes.c_void_p),
        ("seconds", ctypes.c_double * len(PARTS)),
    ]


class NativeStack(LayerStack):
    """Layers with buffers that are reused by steps.

    Layers that stack.c does not have run between its calls, on the same tensors. With attention of
    other backends all of them do.
    """

    def __init__(self, layers: Sequence[DecoderLayer], norm: Norm | None, post_norm: bool = False) -> None:
        super().__init__(layers, norm, post_norm)
        inside = [_is_native(layer) for layer in layers]
        self._calls = _spans(inside)
        native = [layer for layer, is_inside in zip(layers, inside, strict=True) if is_inside]
        output = _packed(native[0].attention.output)
        self._hidden, self._dtype = output.columns, output.dtype
        self._narrow = max(self._hidden, *(layer.attention.shape.queries for layer in native))
        self._wide = max(_width(layer) + layer.parallel * layer.attention.shape.queries for layer in native)
        self._mlp = max(_packed(layer.mlp.up).columns for layer in native)
        each = zip(layers, inside, strict=True)
        self._c_layers = (_Layer * len(layers))(*(_c_layer(layer) if inside else _Layer() for layer, inside in each))
        sizes = len(layers), self._hidden, _MLP_ROWS, self._dtype == torch.float32
        self._c_stack = _Stack(self._c_layers, _c_norm(norm), post_norm, *sizes)
        self._pointer = ctypes.addressof(self._c_stack)
        # What layers' steps are prepared by: attention, block table, pattern, and width of qkv
        self._steps: list[tuple[CpuAttention, int, AttentionPattern, int]] = []
        self._cached: Sequence[CachedLayer] = []
        self._room = 0  # capacity of the buffers in tokens
        self._run = _run_stack()

    @property
    def seconds(self) -> dict[str, float]:
        """Return the seconds spent so far in stack.c, by part."""
        return dict(zip(PARTS, self._c_stack.seconds, strict=True))

    def __call__(
        self, hidden: Tensor, rotations: Sequence[Rotation], attend: AttentionContext, inputs: Tensor | None = None
    ) -> Tensor:
        if not isinstance(attend, StepAttention) or not self._takes(attend.layers):
            return super().__call__(hidden, rotations, attend, inputs)
        tokens = len(hidden)
        if tokens > self._room:
            self._make_room(tokens)
        self._c_stack.threads = torch.get_num_threads()
        self._c_stack.interrupted = attend.interruption.address if attend.interruption is not None else None
        run = self._runner(tokens, rotations, attend)
        residual: Tensor | None = None
        for first, end, is_native in self._calls:
            if is_native:
                hidden, residual = run(first, end, hidden, residual)
                continue
            if residual is not None:
                residual = residual.flatten()[: hidden.numel()].view_as(hidden)
            for index in range(first, end):
                hidden, residual = self._run_layer(index, hidden, residual, rotations, attend, inputs)
        if not is_native:
            return self._last_norm(hidden, residual)
        return self._result[: tokens * self._hidden].view(tokens, self._hidden)

    def _runner(self, tokens: int, rotations: Sequence[Rotation], attend: StepAttention) -> _Runner:
        """Return a function that runs some layers of this step in one call."""
        steps = [
            attention.prepared(attend.metadata[table], pattern, attend.bias, width).pointer
            for attention, table, pattern, width in self._steps
        ]
        turns = (HeadRotation * len(rotations))(*(head_rotation(*rotation) for rotation in rotations))
        needed = None if attend.needed is None else attend.needed.contiguous()
        assert needed is None or needed.dtype == torch.int64
        given = (ctypes.c_void_p * len(steps))(*steps), turns if rotations else None

        def run(first: int, end: int, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
            if residual is None:  # in stack.c the first layer alone has none
                residual = self._residual if first == 0 else torch.zeros_like(hidden)
            hidden, residual = hidden.contiguous(), residual.contiguous()
            wanted = (None, -1) if needed is None else (needed.data_ptr(), len(needed))
            buffers = hidden.data_ptr(), residual.data_ptr(), *self._buffers
            if self._run(self._pointer, first, end, *given, *wanted, tokens, *buffers):
                raise MemoryError(f"layers of {tokens} tokens in int8")
            attend.check_interruption()
            return hidden, residual

        return run

    def _takes(self, cached: Sequence[CachedLayer]) -> bool:
        """Return whether the layers' attention is that of stack.c, and set their caches if so."""
        if cached is self._cached:
            return True
        steps: dict[tuple[CpuAttention, int, AttentionPattern, int], int] = {}
        self._cached = []
        for layer, c_layer, its in zip(self.layers, self._c_layers, cached, strict=True):
            if not isinstance(its.attention, CpuAttention):
                return False
            if not c_layer.qkv:
                continue
            key = its.attention, its.table, its.shape.pattern, _width(layer)
            c_layer.cache, c_layer.scale = its.cache.data_ptr(), its.shape.scale
            c_layer.step = steps.setdefault(key, len(steps))
        self._cached, self._steps = cached, list(steps)
        return True

    def _make_room(self, tokens: int) -> None:
        """Allocate buffers for more than `tokens`, so that slow growth rarely reallocates them."""
        self._room, tokens = 0, max(_LEAST_ROOM, 1 << (tokens - 1).bit_length())
        self._residual = self._result = torch.empty(0)
        self._held: list[Tensor] = []  # frees the old buffers first
        sizes = (
            tokens * self._hidden,
            tokens * self._narrow,
            max(tokens * self._wide, min(tokens, _MLP_ROWS) * self._mlp),
        )
        self._held = zeros_together(sizes, self._dtype)
        self._residual, self._result, wide = self._held
        self._buffers, self._room = (self._result.data_ptr(), wide.data_ptr()), tokens


def can_stack(layers: Sequence[DecoderLayer], norm: Norm | None, post_norm: bool) -> bool:
    """Return whether stack.c has any of the layers, and its norms equal torch's.

    In a `post_norm` stack it must have all, with both norms.
    """
    native = [_is_native(layer) for layer in layers]
    if not any(native) or (norm is None) is not post_norm:
        return False
    if post_norm and not (all(native) and all(layer.attention_norm and layer.mlp_norm for layer in layers)):
        return False
    return norms_match_torch(_packed(layers[native.index(True)].mlp.up).dtype)


def _is_native(layer: DecoderLayer) -> bool:
    """Return whether stack.c has a layer: products use packed matrices, no other rank has a part of
    a norm, parallel parts have a normed input, values have no norm, and nothing follows the MLP.
    """
    part = layer.attention
    packed = all(isinstance(matrix, PackedMatrix) for matrix in _matrices(layer))
    whole = part.row_norm is None or part.row_norm.weights is not None
    known = layer.layer_input is None and layer.scalar is None and part.value_norm is None
    return packed and whole and known and not (layer.parallel and layer.attention_norm is None)


def _spans(inside: Sequence[bool]) -> list[tuple[int, int, bool]]:
    """Return the first and the end of layers next to each other that are alike, and which."""
    borders = [index for index in range(1, len(inside)) if inside[index] != inside[index - 1]]
    return [(first, end, inside[first]) for first, end in pairwise([0, *borders, len(inside)])]


def _width(layer: DecoderLayer) -> int:
    """Return the numbers of a token's queries, keys and values."""
    return layer.attention.shape.queries + 2 * _keys(layer)


def _keys(layer: DecoderLayer) -> int:
    """Return the numbers of a token's keys; 0 for a layer that reads another's."""
    shape = layer.attention.shape
    return shape.keys if shape.reads is None else 0


def _matrices(layer: DecoderLayer) -> tuple[object, ...]:
    return layer.attention.qkv, layer.attention.output, layer.mlp.up, layer.mlp.down


def _packed(projection: object) -> PackedMatrix:
    assert isinstance(projection, PackedMatrix)
    return projection


def _c_norm(norm: Norm | None) -> NormWeights:
    return NormWeights() if norm is None else norm_weights(norm.weight, norm.bias, norm.eps)


def _c_layer(layer: DecoderLayer) -> _Layer:
    matrices, part = [_packed(matrix).pointer for matrix in _matrices(layer)], layer.attention
    norms = layer.attention_norm, layer.mlp_norm, layer.attention_result_norm, layer.mlp_result_norm
    of_heads = [head_norm(norm, part.norm_after_rotation) for norm in (part.query_norm, part.key_norm)]
    of_rows = [NormWeights(), NormWeights()]
    if part.row_norm is not None and part.row_norm.weights is not None:
        of_rows = [norm_weights(weight, None, part.row_norm.eps) for weight in part.row_norm.weights]
    return _Layer(
        *(*map(_c_norm, norms), *of_heads, *of_rows, *matrices),
        sinks=None if part.sinks is None else part.sinks.data_ptr(),
        soft_cap=part.shape.soft_cap or 0.0,
        factor=layer.factor,
        rotation=part.rotation,
        queries=part.shape.queries,
        keys=_keys(layer),
        parallel=layer.parallel,
    )


@functools.cache
def _run_stack() -> ctypes._FuncPointer:
    function, pointer = load().run_stack, ctypes.c_void_p
    size = ctypes.c_ssize_t
    function.argtypes = (pointer, size, size, *(pointer,) * 3, size, size, *(pointer,) * 4)
    return function
