"""Compute the activation xIELU (Huang and Schlag, 2024), whose slopes each layer has learned."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.engine.layers.base import Projection
from workers.engine.layers.weights import Weights


class XIELU:
    """A projection and the activation of its result."""

    def __init__(self, projection: Projection, weights: Weights, name: str) -> None:
        self._projection = projection
        positive, negative = (weights.take(f"{name}.alpha_{sign}", (1,)).float() for sign in ("p", "n"))
        self._beta, self._eps = (weights.take(f"{name}.{each}", ()).float() for each in ("beta", "eps"))
        self._positive, self._negative = F.softplus(positive), self._beta + F.softplus(negative)

    def __call__(self, x: Tensor) -> Tensor:
        wide = self._projection(x).float()
        below = (torch.expm1(torch.minimum(wide, self._eps)) - wide) * self._negative
        curve = torch.where(wide > 0, self._positive * wide.square(), below)
        return (curve + self._beta * wide).to(x.dtype)
