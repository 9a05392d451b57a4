"""Implement the operations of layers in plain torch; `layers.base` has the interface."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.engine.layers.activation import activation as function_of
from workers.engine.layers.base import DecoderLayer, Norm, Projection, Stack, Table
from workers.engine.layers.quantized import QuantizedWeight, Weight
from workers.engine.layers.stack import LayerStack
from workers.engine.layers.stored_matrix import StoredMatrix, whole


class TorchOps:
    """Operations in plain torch, for every device."""

    def linear(self, weight: Weight | StoredMatrix, bias: Tensor | None, activation: str | None = None) -> Projection:
        plain = self.product(whole(weight), bias)
        if activation is None:
            return plain
        activate = function_of(activation)
        return lambda x: activate(plain(x))

    def gated_linear(self, weight: Weight | StoredMatrix, bias: Tensor | None, activation: str) -> Projection:
        function_of(activation)  # refuses an unknown name at load time, not in the first step
        plain = self.product(whole(weight), bias)
        return lambda x: self.gated_activation(activation, plain(x))

    def table(self, weight: Weight | StoredMatrix) -> Table:
        rows = whole(weight)
        return PlainTable(rows) if isinstance(rows, Tensor) else QuantizedTable(rows, self.product(rows, None))

    def product(self, weight: Weight, bias: Tensor | None) -> Projection:
        if isinstance(weight, Tensor):
            return partial(F.linear, weight=weight, bias=bias)
        return partial(_quantized_product, weight=weight, bias=bias)

    def multiplies(self, bits: int | None, dtype: torch.dtype) -> bool:
        return False

    def multiplies_float8(self, device: torch.device) -> bool:
        return False

    def stack(self, layers: Sequence[DecoderLayer], norm: Norm | None, post_norm: bool = False) -> Stack:
        return LayerStack(layers, norm, post_norm)

    def norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        dtype = x.dtype
        if weight.dtype != dtype:
            x, bias = x.float(), None if bias is None else bias.float()
        if bias is None:
            return F.rms_norm(x, weight.shape, weight, eps).to(dtype)
        return F.layer_norm(x, weight.shape, weight, bias, eps).to(dtype)

    def norm_in_place(self, x: Tensor, weight: Tensor, eps: float) -> None:
        x.copy_(self.norm(x, weight, None, eps))

    def add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        total = x.add_(residual)
        return self.norm(total, weight, bias, eps), total

    def gated_activation(self, name: str, gate_up: Tensor) -> Tensor:
        """Return the activation `name` of the first half times the second: [T, 2 * width] -> [T,
        width].
        """
        gate, up = gate_up.chunk(2, -1)
        return function_of(name)(gate).mul_(up)


def _quantized_product(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Return x [..., k] -> [..., n]; the weight is dequantized for each call."""
    return F.linear(x, weight.dequantize(), bias)


class PlainTable:
    __slots__ = ("weight",)

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight  # [vocab, hidden]

    def rows(self, indices: Tensor) -> Tensor:
        return self.weight[indices]

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight)


class QuantizedTable:
    __slots__ = ("_weight", "logits")

    def __init__(self, weight: QuantizedWeight, product: Projection) -> None:
        self._weight, self.logits = weight, product

    def rows(self, indices: Tensor) -> Tensor:
        return self._weight.rows(indices).dequantize()
