"""Weights of fewer bits than the numbers that they are multiplied with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MAX = 127


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A matrix [n, k] whose rows are integers times a scale of their own, for inputs and outputs in
    `dtype`.
    """

    values: Tensor  # int8 [n, k]
    scales: Tensor  # float32 [n]
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def dequantize(self) -> Tensor:
        """Return the matrix in `dtype`."""
        return (self.values * self.scales[:, None]).to(self.dtype)

    def rows(self, indices: Tensor) -> QuantizedWeight:
        """Return some of the rows, by int64 indices."""
        return QuantizedWeight(self.values[indices], self.scales[indices], self.dtype)


Weight = Tensor | QuantizedWeight


def quantize(weight: Tensor) -> QuantizedWeight:
    """Return a matrix [n, k] in int8: each number is rounded to the nearest of 255 ones, which are
    evenly spaced up to its row's largest magnitude.
    """
    largest = torch.linalg.vector_norm(weight, torch.inf, dim=1, dtype=torch.float32)
    scales = largest.clamp_(min=torch.finfo(torch.float32).tiny * _MAX).div_(_MAX)
    values = torch.div(weight, scales[:, None]).round_().to(torch.int8)
    return QuantizedWeight(values, scales, weight.dtype)
