"""Products with weights of 8 and 4 bits against sums of integers, over shapes that fill no panel,
no tile, no group and no depth of sums.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.workers.engine.native.available import needs_native
from workers.engine.layers.activation import activation
from workers.engine.layers.ops import TorchOps
from workers.engine.layers.quantized import QuantizedWeight
from workers.engine.native import packed
from workers.engine.native.ops import NativeOps, PackedTable
from workers.engine.native.packed import PackedMatrix, as_integers, can_pack

pytestmark = needs_native

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [
    (0, 40, 64),
    (1, 32, 2),
    (2, 33, 6),
    (3, 64, 510),
    (18, 100, 64),
    (19, 31, 770),
    (64, 96, 514),
    (100, 2304, 768),
    (700, 65, 1026),
    (30, 70, 6002),
    (9, 40, 64),
    (17, 70, 576),
    (300, 65, 1600),
]
# rows, outputs, inputs: there are several blocks of rows; the last three have inputs that fill
# AMX's tiles
KINDS = {
    "int8": (8, None),
    "int8-24": (8, 24),
    "int8-64": (8, 64),
    "int4": (4, None),
    "int4-32": (4, 32),
    "int4-128": (4, 128),
}
SOME = ["int8", "int4-32", "int4-128"]


def operands(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, kind: str = "int8"
) -> tuple[Tensor, QuantizedWeight, Tensor]:
    torch.manual_seed(rows + outputs + inputs)
    weight = random_weight(outputs, inputs, dtype, *KINDS[kind])
    return torch.randn(rows, inputs).to(dtype), weight, torch.randn(outputs).to(dtype)


def random_weight(outputs: int, inputs: int, dtype: torch.dtype, bits: int, group_size: int | None) -> QuantizedWeight:
    """Return numbers over the whole range of their kind; `group_size`: None for whole rows."""
    size = group_size or inputs
    groups = -(-inputs // size)
    scales = (torch.rand(outputs, groups) + 0.5) * inputs**-0.5
    if bits == 8:
        values = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
        return QuantizedWeight(values, scales / 64, dtype, size)
    values, zeros = (torch.randint(16, (outputs, count), dtype=torch.uint8) for count in (inputs, groups))
    return QuantizedWeight(values, scales / 6, dtype, size, zeros)


def expected_product(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """Return it in float64."""
    rounded = as_integers(x, weight.group_size)
    return F.linear(rounded, replace(weight, dtype=torch.float64).dequantize())


@pytest.mark.parametrize("threads", [1, 2, pytest.param(3, marks=pytest.mark.proof)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), SHAPES)
def test_equals_sums_of_integers(
    rows: int, outputs: int, inputs: int, kind: str, dtype: torch.dtype, threads: int
) -> None:
    torch.set_num_threads(threads)
    x, weight, bias = operands(rows, outputs, inputs, dtype, kind)
    expected = expected_product(x, weight) + bias.double()
    result = PackedMatrix(weight, bias, to_float=True)(x)
    # A number between two integers may become either
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-4)
    rounded = {"rtol": 1 / 128 if dtype == torch.bfloat16 else 1e-5, "atol": 1e-4}
    torch.testing.assert_close(PackedMatrix(weight, bias)(x), expected.to(dtype), **rounded)


@pytest.mark.parametrize("kind", SOME)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_activations_and_padding(dtype: torch.dtype, kind: str) -> None:
    x, weight, bias = operands(13, 66, 64, dtype, kind)
    before = (expected_product(x, weight) + bias.double()).float()
    gate, up = before.chunk(2, -1)
    for name in ("silu", "gelu", "relu"):
        plain = PackedMatrix(weight, bias, name, to_float=True)
        torch.testing.assert_close(plain(x), activation(name)(before), rtol=1e-4, atol=1e-4)
        gated = PackedMatrix(weight, bias, name, gated=True, to_float=True)
        torch.testing.assert_close(gated(x), activation(name)(gate) * up, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("inputs", [1026, 1088])
@pytest.mark.parametrize("kind", SOME)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_whatever_is_computed_beside_it(dtype: torch.dtype, kind: str, inputs: int) -> None:
    x, weight, bias = operands(800, 100, inputs, dtype, kind)
    matrix = PackedMatrix(weight, bias, "gelu_new")
    together = matrix(x)
    for rows in (1, 2, 3, 4, 7, 12, 18, 19, 25, 50, 64, 193, 650):
        assert matrix(x[:rows]).equal(together[:rows])


@pytest.mark.parametrize("rows", [1, 6, 40])
def test_the_largest_sums_do_not_overflow(rows: int) -> None:
    """All numbers of a row, and all weights, are as large as they become; -128 comes from
    outside.
    """
    inputs = 4096
    x = torch.full((rows, inputs), 3.0)
    for value in (127, -128):
        weight = QuantizedWeight(
            torch.full((32, inputs), value, dtype=torch.int8), torch.ones(32, 1), torch.float32, inputs
        )
        expected = torch.full((rows, 32), 3.0 * inputs * value)
        torch.testing.assert_close(PackedMatrix(weight)(x), expected, rtol=1e-6, atol=0)


def test_groups_that_the_kernels_cannot_take_are_left_to_torch() -> None:
    for bits, group_size, taken in ((4, 8, True), (4, 12, False), (8, 12, True), (8, 6, False), (4, 1000, True)):
        weight = random_weight(8, 64, torch.float32, bits, group_size)
        assert can_pack(weight) is taken
        x = torch.randn(3, 64)
        rounded = as_integers(x, weight.group_size).float() if taken else x
        torch.testing.assert_close(
            NativeOps().linear(weight, None)(x), F.linear(rounded, weight.dequantize()), rtol=1e-3, atol=1e-3
        )


def test_rows_with_nan_and_infinities_change_no_others() -> None:
    x, weight, _ = operands(40, 64, 768, torch.float32)
    matrix = PackedMatrix(weight)
    right = matrix(x)
    for row, value in ((3, torch.nan), (17, torch.inf), (39, -torch.inf)):
        x[row, 5 * row] = value
    broken = matrix(x)
    assert not broken[[3, 17, 39]].isfinite().any()
    kept = [row for row in range(40) if row not in (3, 17, 39)]
    assert broken[kept].equal(right[kept])


def test_rows_of_zeros_and_of_extreme_numbers() -> None:
    _, weight, bias = operands(1, 64, 128, torch.float32)
    matrix = PackedMatrix(weight, bias)
    assert matrix(torch.zeros(2, 128)).equal(bias.expand(2, -1))
    assert matrix(torch.full((2, 128), 1e-42)).equal(bias.expand(2, -1))
    large = torch.full((2, 128), 1e30)
    torch.testing.assert_close(matrix(large), F.linear(large, weight.dequantize()), rtol=1e-4, atol=1e26)


@pytest.mark.parametrize("kind", SOME)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_table_gives_rows_and_logits(dtype: torch.dtype, kind: str) -> None:
    x, weight, _ = operands(12, 100, 64, dtype, kind)
    table, indices = PackedTable(weight), torch.randint(0, 100, (130,))
    assert table.rows(indices).equal(weight.dequantize()[indices])
    torch.testing.assert_close(table.logits(x).double(), expected_product(x, weight), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", SOME)
@pytest.mark.parametrize("make", ["linear", "gated_linear"])
def test_projections_equal_those_of_plain_torch(make: str, kind: str) -> None:
    x, weight, bias = operands(21, 66, 256, torch.float32, kind)
    native, plain = (getattr(ops, make)(weight, bias, "silu") for ops in (NativeOps(), TorchOps()))
    assert isinstance(native, PackedMatrix)
    rounded = as_integers(x, weight.group_size).float()
    torch.testing.assert_close(native(x), plain(rounded), rtol=1e-3, atol=1e-3)


def test_torch_computes_products_in_int8_where_the_kernels_are_wrong(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = PackedMatrix.__call__

    def wrong(matrix: PackedMatrix, x: Tensor) -> Tensor:
        return right(matrix, x) * (1 + 1e-2 * (matrix.stored == torch.int8))

    packed._matches_torch.cache_clear()
    monkeypatch.setattr(PackedMatrix, "__call__", wrong)
    try:
        _, weight, bias = operands(1, 32, 64, torch.float32)
        assert can_pack(weight.dequantize())
        assert not can_pack(weight)
        assert not isinstance(NativeOps().linear(weight, bias), PackedMatrix)
    finally:
        packed._matches_torch.cache_clear()
    (record,) = caplog.records
    assert record.getMessage().startswith("CPU kernels: products in int8 differ from torch's here")
