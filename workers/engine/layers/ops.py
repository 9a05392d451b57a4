"""The layers' arithmetic in plain torch; `layers.base` has the interface."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from workers.engine.layers.activation import activation as function_of
from workers.engine.layers.base import DecoderLayer, Norm, Projection, Stack, Table
from workers.engine.layers.stack import LayerStack


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
        self,
        layers: Sequence[DecoderLayer],
        norm: Norm | None,
        heads: int,
        kv_heads: int,
        head_dim: int,
        post_norm: bool = False,
    ) -> Stack:
        return LayerStack(layers, norm, heads, kv_heads, head_dim, post_norm)

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        if bias is None:
            return F.rms_norm(x, weight.shape, weight, eps)
        return F.layer_norm(x, weight.shape, weight, bias, eps)

    def add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = x.add_(residual)
        return self.norm(total, weight, bias, eps), total

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
