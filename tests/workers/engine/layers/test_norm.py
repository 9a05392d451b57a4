"""Norms as the models build them from a checkpoint's tensors."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from workers.engine.layers.norm import HeadLayerNorm, LayerNorm, RMSNorm, RowRMSNorm
from workers.engine.layers.parallel import Shard
from workers.engine.layers.weights import Weights

CPU = torch.device("cpu")


def weights_of(dtype: torch.dtype, **tensors: Tensor) -> Weights:
    return Weights({f"n.{name}": lambda tensor=tensor: tensor for name, tensor in tensors.items()}, dtype, CPU)  # type: ignore[misc]


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_offset_is_added_to_weights_without_rounding(dtype: torch.dtype, centered: bool) -> None:
    """In bfloat16, `1 + 1 / 1024` would be 1."""
    weight, bias, x = torch.full((64,), 1 / 1024), torch.randn(64).to(dtype), torch.randn(5, 64).to(dtype)
    norm = (LayerNorm if centered else RMSNorm)(weights_of(dtype, weight=weight, bias=bias), "n", 64, 1e-6, offset=1.0)
    factor = weight + 1
    plain = F.rms_norm(x.float(), (64,), factor, 1e-6)
    expected = F.layer_norm(x.float(), (64,), factor, bias.float(), 1e-6) if centered else plain
    assert norm.weight.equal(factor)
    assert norm(x).dtype == dtype
    torch.testing.assert_close(norm(x), expected.to(dtype))


def test_all_heads_together_are_normed_in_place() -> None:
    qkv, weight = torch.randn(5, 64), torch.rand(48)
    before = qkv.clone()
    weights = Weights({"q.weight": lambda: weight[:32], "k.weight": lambda: weight[32:]}, torch.float32, CPU)
    RowRMSNorm(weights, ["q", "k"], [Shard(0, 32, 32), Shard(0, 16, 16)], 1e-6)(qkv)
    q, k, v = before.split([32, 16, 16], 1)
    expected = F.rms_norm(q, (32,), weight[:32], 1e-6), F.rms_norm(k, (16,), weight[32:], 1e-6), v
    torch.testing.assert_close(qkv, torch.cat(expected, 1))


def test_a_rank_norms_its_heads_by_their_own_weights() -> None:
    """From one tensor or a tensor for each head, and permuted like the heads' numbers."""
    table, order, x = torch.rand(4, 6), torch.tensor([0, 2, 4, 1, 3, 5]), torch.randn(5, 2, 6)
    tensors = {"n.weight": lambda: table} | {f"n.{head}.weight": lambda head=head: table[head] for head in range(4)}  # type: ignore[misc]
    expected = F.layer_norm(x, (6,), eps=1e-6) * table[2:]
    for names in ("n", [f"n.{head}" for head in range(4)]):
        weights = Weights(tensors, torch.float32, CPU)
        norm = HeadLayerNorm(weights, names, Shard(2, 2, 4), 6, 1e-6, order)
        torch.testing.assert_close(norm(x[..., order]), expected[..., order])
