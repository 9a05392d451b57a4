"""Products by AMX against those by vectors on the same processor."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.workers.engine.native.available import missing_native, needs_native
from tests.workers.engine.native.test_integers import DTYPES, KINDS, operands
from workers.engine.native import packed
from workers.engine.native.packed import PackedMatrix, can_pack

BF16, INT8, INT4 = (packed._STORED.index(dtype) for dtype in (torch.bfloat16, torch.int8, torch.uint8))


def uses_tiles() -> bool:
    """Whether the library has them and the system gives their registers."""
    if missing_native():
        return False
    packed._functions().use_tiles(BF16, True)
    return bool(packed._functions().use_tiles(BF16, True))


pytestmark = [needs_native, pytest.mark.skipif(not uses_tiles(), reason="the CPU kernels have no AMX here")]


@pytest.fixture(autouse=True)
def tiles_as_before() -> Iterator[None]:
    use = packed._functions().use_tiles
    before = [use(stored, True) for stored in (BF16, INT8, INT4)]
    yield
    for stored, used in zip((BF16, INT8, INT4), before, strict=True):
        use(stored, used)


def without_tiles(matrix: PackedMatrix, x: Tensor, stored: int) -> Tensor:
    packed._functions().use_tiles(stored, False)
    product = matrix(x)
    packed._functions().use_tiles(stored, True)
    return product


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("int8-24", "int4-32")])
@pytest.mark.parametrize("rows", [8, 15, 16, 33, 300])
def test_sums_of_integers_are_the_same(rows: int, kind: str, dtype: torch.dtype) -> None:
    x, weight, bias = operands(rows, 100, 1088, dtype, kind)
    matrix = PackedMatrix(weight, bias, "silu")
    assert matrix(x).equal(without_tiles(matrix, x, INT8 if kind.startswith("int8") else INT4))


@pytest.mark.parametrize("rows", [1, 15, 16, 33, 300])
def test_sums_of_bfloat16_have_another_order(rows: int) -> None:
    x, weight = (torch.randn(count, 1088).bfloat16() for count in (rows, 100))
    matrix = PackedMatrix(weight, to_float=True)
    by_tiles, by_vectors = matrix(x), without_tiles(matrix, x, BF16)
    torch.testing.assert_close(by_tiles, by_vectors, rtol=1e-4, atol=1e-4)
    assert not by_tiles.equal(by_vectors)  # so these are two kernels


def test_products_that_are_wrong_by_tiles_are_left_to_vectors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = PackedMatrix.__call__

    def spoiled(matrix: PackedMatrix, x: Tensor) -> Tensor:
        use = packed._functions().use_tiles
        used = use(BF16, True)
        use(BF16, used)
        return right(matrix, x) * (1 + 1e-3 * used)

    packed._matches_torch.cache_clear()
    monkeypatch.setattr(PackedMatrix, "__call__", spoiled)
    try:
        assert can_pack(torch.empty(1, 64, dtype=torch.bfloat16))
    finally:
        packed._matches_torch.cache_clear()
    (record,) = caplog.records
    assert record.getMessage().startswith("CPU kernels: products by AMX differ from torch's here; those by AVX-512")
    assert not packed._functions().use_tiles(BF16, True)
