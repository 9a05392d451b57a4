"""Products with packed matrices against plain ones in float, over shapes that fill no panel and no
tile.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.workers.engine.native.available import needs_native
from workers.engine.layers.activation import activation
from workers.engine.messages.errors import ModelLoadError
from workers.engine.native import packed
from workers.engine.native.ops import NativeOps
from workers.engine.native.packed import ACTIVATIONS, PackedMatrix, can_pack

pytestmark = needs_native

SHAPES = [
    (1, 32, 2),
    (2, 33, 6),
    (12, 100, 64),
    (13, 31, 770),
    (64, 96, 130),
    (100, 2304, 768),
    (700, 65, 1026),
    (30, 70, 6000),
    (5, 40, 32),
    (17, 70, 576),
    (50, 33, 1088),
    (300, 65, 1600),
]
# rows, outputs, inputs: there are several blocks of rows, and rows too long for blocks in bfloat16;
# the last four have inputs that fill AMX's tiles, and tiles of rows that are not full, or shared
STORED = [torch.float32, torch.float16, torch.bfloat16]


def operands(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype = torch.float32, stored: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and bias in `dtype`, the weight's numbers being some of `stored`."""
    torch.manual_seed(rows + outputs + inputs)
    return (
        torch.randn(rows, inputs).to(dtype),
        (torch.randn(outputs, inputs) * inputs**-0.5).to(stored).to(dtype),
        torch.randn(outputs).to(dtype),
    )


@pytest.mark.parametrize("threads", [1, 2, pytest.param(3, marks=pytest.mark.proof)])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), SHAPES)
def test_equals_torch(rows: int, outputs: int, inputs: int, threads: int, dtype: torch.dtype) -> None:
    torch.set_num_threads(threads)
    x, weight, bias = operands(rows, outputs, inputs, dtype)
    expected = F.linear(x.float(), weight.float(), bias.float())
    torch.testing.assert_close(PackedMatrix(weight, bias, to_float=True)(x), expected, rtol=1e-5, atol=1e-5)
    rounded = {"rtol": 1 / 128 if dtype == torch.bfloat16 else 1e-5, "atol": 1e-5}
    torch.testing.assert_close(PackedMatrix(weight, bias)(x), expected.to(dtype), **rounded)
    torch.testing.assert_close(PackedMatrix(weight)(x), F.linear(x.float(), weight.float()).to(dtype), **rounded)


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), SHAPES)
def test_equals_torch_however_weights_are_stored(rows: int, outputs: int, inputs: int, stored: torch.dtype) -> None:
    x, weight, bias = operands(rows, outputs, inputs, stored=stored)
    matrix = PackedMatrix(weight, bias)
    assert matrix.stored == stored
    torch.testing.assert_close(matrix(x), F.linear(x, weight, bias), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("numbers", "stored"),
    [
        ([0.0, -0.0, 1.0, 2.0**127], torch.bfloat16),
        ([torch.inf, -torch.inf, torch.nan, 1.0], torch.bfloat16),
        ([1 + 2**-10, 65504.0, 2**-24, -(2**-14) - 2**-24], torch.float16),
        ([1 + 2**-10, 65536.0], torch.float32),
        ([1 + 2**-10, torch.nan], torch.float32),
        ([1 + 2**-10, 2**-25], torch.float32),
        ([1 + 2**-10, 2**-15 + 2**-26], torch.float32),
        ([1 + 2**-11, 1.0], torch.float32),
        ([1 + 2**-23, 1.0], torch.float32),
    ],
)
def test_weights_are_stored_in_the_fewest_bits_that_hold_them(numbers: list[float], stored: torch.dtype) -> None:
    weight = torch.tensor(numbers * 40_000).view(-1, 8)
    matrix = PackedMatrix(weight)
    assert matrix.stored == stored
    rows = matrix.rows(torch.arange(len(weight)))
    torch.testing.assert_close(rows, weight, rtol=0, atol=0, equal_nan=True)
    assert rows.nan_to_num().signbit().equal(weight.nan_to_num().signbit())


def test_one_number_among_many_decides_what_weights_are_stored_as() -> None:
    weight = torch.ones(1000, 64)
    weight[999, 63] = 1 + 2**-20
    assert PackedMatrix(weight).stored == torch.float32


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activations(name: str, dtype: torch.dtype) -> None:
    x, weight, bias = operands(13, 66, 64, dtype)
    before = F.linear(x.float() * 4, weight.float(), bias.float())
    matrix = PackedMatrix(weight, bias, name, to_float=True)
    torch.testing.assert_close(matrix(x * 4), activation(name)(before), rtol=2e-5, atol=2e-5)
    gated = PackedMatrix(weight, bias, name, gated=True, to_float=True)
    gate, up = before.chunk(2, -1)
    torch.testing.assert_close(gated(x * 4), activation(name)(gate) * up, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_new", "quick_gelu"])
def test_activations_are_as_exact_as_torch_s(name: str, dtype: torch.dtype) -> None:
    values = torch.linspace(-12, 12, 4097).to(dtype)
    x, weight = torch.stack((values, torch.zeros_like(values)), 1), torch.tensor([[1.0, 0.0]] * 32).to(dtype)
    result = PackedMatrix(weight, None, name, to_float=True)(x)[:, 0]
    exact = activation(name)(values.double())
    assert (result - exact).abs().max() < 5e-7 * values.float().abs().max()


def test_extreme_sums_are_activated_as_torch_does(dtype: torch.dtype) -> None:
    x = torch.tensor([[1e30, 0], [-1e30, 0], [100, 0], [-100, 0], [torch.nan, 0], [torch.inf, 0]]).to(dtype)
    weight = torch.zeros(32, 2, dtype=dtype)
    weight[:, 0] = 1
    for name in ("silu", "gelu", "gelu_new", "relu", "relu2", "quick_gelu"):
        expected = activation(name)(x.float()[:, :1]).expand(-1, 32)
        torch.testing.assert_close(
            PackedMatrix(weight, None, name, to_float=True)(x), expected, equal_nan=True, rtol=1e-6, atol=1e-30
        )


@pytest.mark.parametrize("inputs", [1026, 1088])
@pytest.mark.parametrize("stored", STORED)
def test_a_row_is_the_same_whatever_is_computed_beside_it(stored: torch.dtype, dtype: torch.dtype, inputs: int) -> None:
    x, weight, bias = operands(800, 100, inputs, dtype, stored)
    matrix = PackedMatrix(weight, bias, "gelu_new")
    together = matrix(x)
    for rows in (1, 2, 3, 4, 7, 12, 13, 16, 17, 25, 32, 33, 50, 64, 193, 650):
        assert matrix(x[:rows]).equal(together[:rows])


def test_calls_at_the_same_time_work_apart(dtype: torch.dtype) -> None:
    torch.set_num_threads(2)
    products = [(PackedMatrix(weight), x) for x, weight, _ in (operands(300, 256 + n, 512, dtype) for n in range(4))]
    expected = [matrix(x) for matrix, x in products]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            assert all(map(torch.equal, pool.map(lambda product: product[0](product[1]), products), expected))


@pytest.mark.parametrize("stored", STORED)
def test_rows_are_the_weight_s(stored: torch.dtype, dtype: torch.dtype) -> None:
    _, weight, _ = operands(1, 100, 64, dtype, stored)
    indices = torch.randint(0, 100, (130,))
    assert PackedMatrix(weight).rows(indices).equal(weight[indices])


def test_inputs_with_more_dimensions_and_gaps(dtype: torch.dtype) -> None:
    x, weight, _ = operands(12, 40, 64, dtype)
    matrix = PackedMatrix(weight)
    assert matrix(x.view(3, 4, 64)).equal(matrix(x).view(3, 4, 40))
    assert matrix(x.repeat(1, 2)[:, :64]).equal(matrix(x))
    assert matrix(x[:0]).shape == (0, 40)
    assert PackedMatrix(weight.repeat(1, 2)[:, :64])(x).equal(matrix(x))


def test_what_does_not_fit_is_refused() -> None:
    matrix = PackedMatrix(operands(1, 40, 64)[1])
    for x in (torch.zeros(2, 128), torch.zeros(2, 64, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match=r"rows of 64 torch.float32"):
            matrix(x)


def test_an_activation_that_is_not_known_is_refused_as_everywhere() -> None:
    weight = operands(1, 40, 64)[1]
    for refused in (
        lambda: NativeOps().linear(weight, None, "quick"),
        lambda: NativeOps().gated_linear(weight, None, "quick"),
    ):
        with pytest.raises(ModelLoadError, match="activation 'quick'; supported are"):
            refused()


def test_products_that_are_wrong_on_a_processor_are_left_to_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = PackedMatrix.__call__
    packed._matches_torch.cache_clear()
    monkeypatch.setattr(PackedMatrix, "__call__", lambda matrix, x: right(matrix, x) * (1 + 1e-3 * (len(x) > 1)))
    try:
        assert not can_pack(torch.empty(1, 64, dtype=torch.float32))
        assert not isinstance(NativeOps().linear(torch.ones(32, 64), None), PackedMatrix)
    finally:
        packed._matches_torch.cache_clear()
    (record,) = caplog.records
    assert record.getMessage().startswith("CPU kernels: products in float32 differ from torch's here; torch's are used")


def test_what_cannot_be_packed() -> None:
    assert not can_pack(torch.empty(1, 0, dtype=torch.float32))
    assert not can_pack(torch.empty(1, 63, dtype=torch.float32))
    assert not can_pack(torch.empty(1, 64, dtype=torch.float16))
    assert not can_pack(torch.empty(1, 64, dtype=torch.float64))
