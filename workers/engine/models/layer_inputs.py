"""Compute the inputs that layers read beside the residual stream (Gemma 4's E2B and E4B)."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.engine.layers.base import LayerInputPart
from workers.engine.layers.linear import load_fused
from workers.engine.layers.norm import RMSNorm
from workers.engine.layers.parallel import Shard
from workers.engine.layers.weights import Weights
from workers.engine.models.config import ModelConfig


class LayerInputs:
    """For each token and layer, a row of a second embedding table and a projection of the token's
    embedding.

    The table has `vocab_size` rows of `size` numbers for each layer.
    """

    def __init__(self, weights: Weights, config: ModelConfig, vocab_size: int, size: int) -> None:
        layers, self._size = len(config.layers), size
        self._table = weights.ops.table(
            weights.take_table("*.embed_tokens_per_layer.weight", vocab_size, layers * size)
        )
        self._factor = float(torch.tensor(size**0.5, dtype=weights.dtype))
        rows = [Shard(0, layers * size, layers * size)]
        self._projection = load_fused(weights, ["*.per_layer_model_projection"], config.hidden_size, rows, False)
        self._scale = config.hidden_size**-0.5
        self._norm = RMSNorm(weights, "*.per_layer_projection_norm", size, config.norm_eps)

    def __call__(self, input_ids: Tensor, embedded: Tensor) -> Tensor:
        """Return [T, layers, size] from int64 [T] ids and their embeddings [T, hidden]."""
        rows = self._table.rows(input_ids).mul_(self._factor)
        projected = self._norm(self._projection(embedded).mul_(self._scale).view(len(rows), -1, self._size))
        return projected.add_(rows.view_as(projected)).mul_(2.0**-0.5)


def load_layer_input(weights: Weights, layer: str, config: ModelConfig, size: int) -> LayerInputPart:
    """Return the part of a layer that reads its input; every rank has all of it."""
    hidden, gate, projection = config.hidden_size, f"{layer}.per_layer_input_gate", f"{layer}.per_layer_projection"
    return LayerInputPart(
        load_fused(weights, [gate], hidden, [Shard(0, size, size)], False, activation=config.activation),
        load_fused(weights, [projection], size, [Shard(0, hidden, hidden)], False),
        RMSNorm(weights, f"{layer}.post_per_layer_input_norm", hidden, config.norm_eps),
    )
