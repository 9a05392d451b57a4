"""The layers' arithmetic that a device may fuse, behind one interface; `make_ops` picks it by the
attention backend's name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from workers.engine.layers.activation import activation as function_of
from workers.engine.layers.norm import LayerNorm, RMSNorm
from workers.engine.layers.stack import DecoderLayer, LayerStack

Projection = Callable[[Tensor], Tensor]
"""x [..., in] -> [..., out]."""


class Table(Protocol):
    """A matrix [vocab, hidden] as an embedding, as the output head, or as both where a model ties
    them.
    """

    def rows(self, indices: Tensor) -> Tensor:
        """int64 [T] -> [T, hidden]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, vocab] in whichever float dtype they come."""
        ...


class Ops(Protocol):
    """Weights are handed over: what is made of them may keep them in an order of its own, and the
    caller keeps none.

    Norms go over the last dimension and sum in float32. A sum of `x` and `residual` is rounded to
    their dtype before it is normed.
    """

    def linear(self, weight: Tensor, bias: Tensor | None, activation: str | None = None) -> Projection:
        """x -> activation(x weight.T + bias) for weight [out, in].

        Raises ModelLoadError as `activation` does.
        """
        ...

    def gated_linear(self, weight: Tensor, bias: Tensor | None, activation: str) -> Projection:
        """x -> activation(gate) * up, where x weight.T + bias [..., 2 * width] has the gates first.

        Raises as `linear`.
        """
        ...

    def table(self, weight: Tensor) -> Table: ...

    def stack(
        self, layers: Sequence[DecoderLayer], norm: RMSNorm | LayerNorm, heads: int, kv_heads: int, head_dim: int
    ) -> LayerStack:
        """Return a decoder out of layers that were made with these."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm (Zhang and Sennrich, 2019) of x [..., size]."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return the norm of x + residual, and x + residual itself.

        Neither argument is of use afterwards.
        """
        ...

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """Layer norm (Ba et al., 2016) of x [..., size]."""
        ...

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return the norm of x + residual, and x + residual itself.

        Neither argument is of use afterwards.
        """
        ...


class TorchOps:
    """Plain torch, for every device."""

    def linear(self, weight: Tensor, bias: Tensor | None, activation: str | None = None) -> Projection:
        plain = partial(F.linear, weight=weight, bias=bias)
        if activation is None:
            return plain
        activate = function_of(activation)
        return lambda x: activate(plain(x))

    def gated_linear(self, weight: Tensor, bias: Tensor | None, activation: str) -> Projection:
        function_of(activation)  # an unknown one is refused here, not by the first step
        return lambda x: self.gated_activation(activation, F.linear(x, weight, bias))

    def table(self, weight: Tensor) -> Table:
        return PlainTable(weight)

    def stack(
        self, layers: Sequence[DecoderLayer], norm: RMSNorm | LayerNorm, heads: int, kv_heads: int, head_dim: int
    ) -> LayerStack:
        return LayerStack(layers, norm, heads, kv_heads, head_dim)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x.add_(residual)
        return self.rms_norm(total, weight, eps), total

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return F.layer_norm(x, weight.shape, weight, bias, eps)

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = x.add_(residual)
        return self.layer_norm(total, weight, bias, eps), total

    def gated_activation(self, name: str, gate_up: Tensor) -> Tensor:
        """[T, 2 * width] -> [T, width]: the activation `name` of the first half times the
        second.
        """
        gate, up = gate_up.chunk(2, -1)
        return function_of(name)(gate).mul_(up)


class PlainTable:
    __slots__ = ("weight",)

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight  # [vocab, hidden]

    def rows(self, indices: Tensor) -> Tensor:
        return self.weight[indices]

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight)


def make_ops(backend: str) -> Ops:
    """Those that go with an attention backend."""
    if backend == "triton":
        from workers.engine.kernels.ops import TritonOps

        return TritonOps()
    if backend == "cpu":
        from workers.engine.native.ops import NativeOps

        return NativeOps()
    return TorchOps()
