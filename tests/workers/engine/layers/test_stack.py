"""A stack of layers against the plain formula, with norms before their parts or behind them."""

from __future__ import annotations

from itertools import count

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from workers.engine.layers.base import AttentionPart, AttentionShape, DecoderLayer, MlpPart, RotaryHeads, Rotation
from workers.engine.layers.norm import LayerNorm
from workers.engine.layers.ops import TorchOps
from workers.engine.layers.rope_config import RopeConfig
from workers.engine.layers.rotary import Rotary, rotate
from workers.engine.layers.stack import LayerStack
from workers.engine.layers.weights import Weights

CPU = torch.device("cpu")
HIDDEN, HEADS, DIM, WIDTH, TOKENS = 24, 3, 8, 40, 11
ROPES = [Rotary(RopeConfig(theta, "default", {}, 64), DIM, 64, torch.float32, CPU) for theta in (1e2, 1e4)]


class AllSeeAll:
    """Attention of one text, without a mask."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (q, k, v))).transpose(0, 1)

    def rotary(self, layer: int, qkv: Tensor, rotary: RotaryHeads, sinks: Tensor | None = None) -> Tensor:
        q, k, v = qkv.split(HEADS, 1)
        return self(layer, *(rotate(x, rotary.cos, rotary.sin) for x in (q, k)), v)


class Parts:
    """Layers with random weights, and what they do one by one."""

    def __init__(self, first_norm: bool = True) -> None:
        torch.manual_seed(5)
        ops, self.numbers = TorchOps(), count()
        self.layers = [
            DecoderLayer(
                AttentionPart(
                    AttentionShape(HEADS, HEADS, DIM, DIM**-0.5),
                    ops.linear(torch.randn(3 * HEADS * DIM, HIDDEN), torch.randn(3 * HEADS * DIM)),
                    ops.linear(torch.randn(HIDDEN, HEADS * DIM), torch.randn(HIDDEN)),
                    rotation=index % 2,
                ),
                MlpPart(
                    ops.linear(torch.randn(WIDTH, HIDDEN), torch.randn(WIDTH), "gelu"),
                    ops.linear(torch.randn(HIDDEN, WIDTH), torch.randn(HIDDEN)),
                ),
                self.norm() if first_norm or index else None,
                self.norm(),
            )
            for index in range(3)
        ]
        self.last_norm, self.embeddings = self.norm(), torch.randn(TOKENS, HIDDEN)

    def norm(self) -> LayerNorm:
        name = str(next(self.numbers))
        weights = Weights(
            {f"{name}.{part}": lambda: torch.rand(HIDDEN) for part in ("weight", "bias")}, torch.float32, CPU
        )
        return LayerNorm(weights, name, HIDDEN, 1e-5)

    def attended(self, layer: DecoderLayer, x: Tensor, rotations: list[Rotation]) -> Tensor:
        q, k, v = layer.attention.qkv(x).view(TOKENS, 3 * HEADS, DIM).split(HEADS, 1)
        if rotations:
            q, k = (rotate(of, *rotations[layer.attention.rotation]) for of in (q, k))
        return layer.attention.output(AllSeeAll()(0, q, k, v).reshape(TOKENS, -1))

    def pre_norm(self, rotations: list[Rotation]) -> Tensor:
        x = self.embeddings.clone()
        for layer in self.layers:
            x = x + self.attended(layer, x if layer.attention_norm is None else layer.attention_norm(x), rotations)
            assert layer.mlp_norm is not None
            x = x + layer.mlp.down(layer.mlp.up(layer.mlp_norm(x)))
        return self.last_norm(x)

    def post_norm(self, rotations: list[Rotation]) -> Tensor:
        x = self.embeddings.clone()
        for layer in self.layers:
            assert layer.attention_norm is not None
            assert layer.mlp_norm is not None
            x = layer.attention_norm(x + self.attended(layer, x, rotations))
            x = layer.mlp_norm(x + layer.mlp.down(layer.mlp.up(x)))
        return x


def rotations_of(number: int) -> list[Rotation]:
    return [rope.cos_sin(torch.arange(TOKENS), torch.arange(TOKENS)) for rope in ROPES[:number]]


@pytest.mark.parametrize("rotations", [0, 2])
def test_norms_behind_the_parts(rotations: int) -> None:
    parts = Parts()
    stack = LayerStack(parts.layers, None, post_norm=True)
    expected = parts.post_norm(rotations_of(rotations))
    torch.testing.assert_close(stack(parts.embeddings, rotations_of(rotations), AllSeeAll()), expected)


@pytest.mark.parametrize("first_norm", [True, False])
@pytest.mark.parametrize("rotations", [0, 2])
def test_norms_before_the_parts(rotations: int, first_norm: bool) -> None:
    parts = Parts(first_norm)
    stack = LayerStack(parts.layers, parts.last_norm)
    expected = parts.pre_norm(rotations_of(rotations))
    torch.testing.assert_close(stack(parts.embeddings, rotations_of(rotations), AllSeeAll()), expected)
