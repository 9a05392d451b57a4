"""Norms as the models build them from a checkpoint's tensors."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from workers.engine.layers.norm import LayerNorm, RMSNorm
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
