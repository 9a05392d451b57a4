"""Norms against torch's, over sizes that fill no block and rows that fill no program."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.workers.engine.kernels.devices import DEVICE
from workers.engine.kernels.norm import add_normed, norm_in_place, normed

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1 / 64, torch.float16: 1 / 512}


def expected(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    x, size = x.float(), weight.shape
    if bias is None:
        return F.rms_norm(x, size, weight.float(), 1e-6)
    return F.layer_norm(x, size, weight.float(), bias.float(), 1e-6)


def check(rows: int, size: int, dtype: torch.dtype, centered: bool, wide: bool = False) -> None:
    torch.manual_seed(size)
    x, residual = torch.randn(2, rows, size, device=DEVICE).mul(3).add(1).to(dtype)
    weight, bias = torch.randn(2, size, device=DEVICE)
    weight, bias = weight if wide else weight.to(dtype), bias.to(dtype)
    shift = bias if centered else None
    alone = normed(x, weight, shift, 1e-6)
    torch.testing.assert_close(alone.float(), expected(x, weight, shift), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    total = x + residual
    after, left = add_normed(x.clone(), residual.clone(), weight, shift, 1e-6)
    # The interpreter cuts bf16 off where a GPU rounds.
    torch.testing.assert_close(
        left.float(), total.float(), rtol=0 if DEVICE.type == "cuda" else TOLERANCE[dtype] / 2, atol=0
    )
    torch.testing.assert_close(
        after.float(), expected(left, weight, shift), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "size"), [(5, 16), (3, 576), (2, 1024), (1, 5120)])
def test_equals_torch(rows: int, size: int, dtype: torch.dtype, centered: bool, wide: bool) -> None:
    check(rows, size, dtype, centered, wide)


def test_heads_of_a_larger_tensor() -> None:
    qkv, weight = torch.randn(4, 7, 24, device=DEVICE), torch.randn(24, device=DEVICE)
    torch.testing.assert_close(normed(qkv[:, :3], weight, None, 1e-6), expected(qkv[:, :3], weight, None))


def test_rows_that_are_apart_are_normed_in_place() -> None:
    qkv, weight = torch.randn(5, 100, device=DEVICE), torch.randn(48, device=DEVICE)
    before = qkv.clone()
    norm_in_place(qkv[:, 20:68], weight, 1e-6)
    torch.testing.assert_close(qkv[:, 20:68], expected(before[:, 20:68], weight, None))
    before[:, 20:68] = qkv[:, 20:68]
    assert qkv.equal(before)


def test_no_rows() -> None:
    assert normed(torch.empty(0, 64, device=DEVICE), torch.ones(64, device=DEVICE), None, 1e-6).shape == (0, 64)


@pytest.mark.gpu
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("rows", "size"), [(16384, 1024), (1024, 4096), (257, 8192), (33, 20_000), (7777, 128), (1, 576)]
)
def test_real_shapes(rows: int, size: int, dtype: torch.dtype, centered: bool) -> None:
    check(rows, size, dtype, centered)
