"""Norms in C against torch's."""

import pytest
import torch
import torch.nn.functional as F

from tests.workers.engine.native.available import needs_native
from workers.engine.native.ops import NativeOps

pytestmark = needs_native

TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 1 / 128}


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("rows", "size"), [(1, 16), (5, 63), (3, 576), (70, 768), (2, 5120)])
def test_equals_torch(rows: int, size: int, dtype: torch.dtype, centered: bool, wide: bool) -> None:
    torch.manual_seed(size)
    x, residual = torch.randn(2, rows, size).mul(3).add(1).to(dtype)
    weight, bias = torch.randn(2, size)
    weight, bias = weight if wide else weight.to(dtype), bias.to(dtype)
    ops, tolerance = NativeOps(), TOLERANCE[dtype]
    total = x + residual
    if centered:
        alone, (after, left) = (
            ops.norm(x, weight, bias, 1e-6),
            ops.add_norm(x.clone(), residual, weight, bias, 1e-6),
        )
        expected = [F.layer_norm(part.float(), (size,), weight.float(), bias.float(), 1e-6) for part in (x, total)]
    else:
        alone, (after, left) = ops.norm(x, weight, None, 1e-6), ops.add_norm(x.clone(), residual, weight, None, 1e-6)
        expected = [F.rms_norm(part.float(), (size,), weight.float(), 1e-6) for part in (x, total)]
    assert left.equal(total)
    for got, wanted in zip((alone, after), expected, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.float(), wanted, rtol=tolerance, atol=tolerance)


def test_heads_of_a_larger_tensor() -> None:
    qkv, weight = torch.randn(4, 7, 24), torch.randn(24)
    torch.testing.assert_close(
        NativeOps().norm(qkv[:, :3], weight, None, 1e-6), F.rms_norm(qkv[:, :3], (24,), weight, 1e-6)
    )


def test_no_rows() -> None:
    assert NativeOps().norm(torch.empty(0, 64), torch.ones(64), None, 1e-6).shape == (0, 64)
