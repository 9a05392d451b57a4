"""Products with weights of 4 and 8 bits against torch's in float32."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.workers.engine.kernels.devices import DEVICE
from workers.engine.kernels import quantized_matmul
from workers.engine.kernels.ops import TritonOps
from workers.engine.kernels.quantized_matmul import DEQUANTIZED_ROWS, QuantizedMatmul, matches_torch, pack, tiles
from workers.engine.layers.quantized import QuantizedWeight, quantize

# Of the largest sum. Weights are multiplied as they are, so only inputs, sums and results round.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1 / 128, torch.float16: 1 / 1024}


def random_weight(n: int, k: int, dtype: torch.dtype, kind: str, group_size: int | None = None) -> QuantizedWeight:
    """Return numbers from one end of the range of "int4", "int8" or "float8" to the other."""
    size = group_size or k
    groups = -(-k // size)
    scales = torch.rand(n, groups, device=DEVICE).add(0.5) / (k**0.5)
    if kind == "int4":
        values, zeros = (torch.randint(0, 16, (n, width), device=DEVICE, dtype=torch.uint8) for width in (k, groups))
        return QuantizedWeight(values, scales / 4, dtype, size, zeros)
    if kind == "int8":
        return QuantizedWeight(
            torch.randint(-128, 128, (n, k), device=DEVICE, dtype=torch.int8), scales / 64, dtype, size
        )
    return QuantizedWeight(torch.randn(n, k, device=DEVICE).to(torch.float8_e4m3fn), scales, dtype, size)


def expected_product(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    plain = QuantizedWeight(weight.values, weight.scales, torch.float32, weight.group_size, weight.zeros).dequantize()
    return F.linear(x.float(), plain, None if bias is None else bias.float())


def check(
    rows: int,
    n: int,
    k: int,
    kind: str,
    group_size: int | None = None,
    dtype: torch.dtype = torch.float16,
    with_bias: bool = False,
) -> None:
    torch.manual_seed(rows + n + k)
    weight = random_weight(n, k, dtype, kind, group_size)
    x = torch.randn(rows, k, device=DEVICE).to(dtype)
    bias = torch.randn(n, device=DEVICE).to(dtype) if with_bias else None
    found, expected = QuantizedMatmul(weight, bias)(x), expected_product(x, weight, bias)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=TOLERANCE[dtype] * float(expected.abs().max()))


@pytest.fixture
def compared_anew() -> Iterator[None]:
    matches_torch.cache_clear()
    yield
    matches_torch.cache_clear()


@pytest.mark.usefixtures("compared_anew")
@pytest.mark.parametrize("kind", ["int4", "int8", "float8"])
@pytest.mark.parametrize("group_size", [None, 32])
def test_products_that_come_out_right_are_used(
    kind: str, group_size: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    weight = random_weight(32, 64, torch.float16, kind, group_size)
    assert isinstance(TritonOps().product(weight, None), QuantizedMatmul)
    assert not caplog.records


@pytest.mark.usefixtures("compared_anew")
@pytest.mark.parametrize("fault", ["", "out of resource: shared memory\nand more"])
def test_a_kernel_that_fails_or_is_wrong_is_not_used(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def multiply(product: QuantizedMatmul, x: Tensor, out: Tensor, rows: int) -> None:
        if fault:
            raise RuntimeError(fault)
        out[:] = x.sum(1, keepdim=True)

    monkeypatch.setattr(QuantizedMatmul, "_multiply", multiply)
    weight, x = random_weight(32, 64, torch.float16, "int8"), torch.randn(3, 64, device=DEVICE).half()
    products = [TritonOps().product(weight, None) for _ in range(2)]
    assert products[0](x).equal(F.linear(x, weight.dequantize()))
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith(f"the kernel for quantized weights is not used on {DEVICE.type}")
    assert "\n" not in line
    assert ("out of resource: shared memory" in line) == bool(fault)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)],  # not interpreted in products
)
@pytest.mark.parametrize("kind", ["int4", "int8", "float8"])
def test_equals_torch(kind: str, dtype: torch.dtype) -> None:
    check(3, 96, 256, kind, 64, dtype, with_bias=True)


@pytest.mark.parametrize("kind", ["int4", "int8"])
@pytest.mark.parametrize(
    ("n", "k", "group_size"),
    [(70, 200, None), (24, 37, None), (65, 208, 16), (40, 144, 48), (32, 1032, 128), (32, 96, 64), (16, 300, 32)],
)
def test_sizes_that_fill_no_tile(n: int, k: int, group_size: int | None, kind: str) -> None:
    check(2, n, k, kind, group_size, torch.float32, with_bias=True)


@pytest.mark.parametrize("rows", [1, 16, 17, 64, 65, 130])
def test_few_rows_and_many(rows: int) -> None:
    check(rows, 80, 320, "int4", 32)


@pytest.mark.parametrize("kind", ["int4", "int8", "float8"])
@pytest.mark.parametrize("group_size", [None, 32])
def test_many_rows_are_multiplied_by_torch(kind: str, group_size: int | None) -> None:
    """With the weight rounded to 16 bits, which the kernel does not round."""
    torch.manual_seed(6)
    weight = random_weight(24, 80, torch.float16, kind, group_size)
    x, bias = torch.randn(DEQUANTIZED_ROWS, 80, device=DEVICE).half(), torch.randn(24, device=DEVICE).half()
    product, dequantized = QuantizedMatmul(weight, bias), F.linear(x, weight.dequantize(), bias)
    exact = expected_product(x, weight, bias)
    assert product(x).equal(dequantized)
    fewer = product(x[1:])
    assert not fewer.equal(dequantized[1:])
    for found, expected in ((product(x), exact), (fewer, exact[1:])):
        atol = TOLERANCE[torch.float16] * float(exact.abs().max())
        torch.testing.assert_close(found.float(), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("n", "k", "group_size"), [(200, 37, None), (130, 144, 48), (64, 300, 32)])
def test_weights_are_dequantized_in_pieces(
    n: int, k: int, group_size: int | None, with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(7)
    for kind in ("int4", "int8", "float8"):
        weight = random_weight(n, k, torch.float32, kind, group_size)
        x = torch.randn(DEQUANTIZED_ROWS, k, device=DEVICE)
        bias = torch.randn(n, device=DEVICE) if with_bias else None
        expected = F.linear(x, weight.dequantize(), bias)
        for numbers in (1, 128 * k, 1 << 20):
            monkeypatch.setattr(quantized_matmul, "_BUFFER", numbers)
            torch.testing.assert_close(QuantizedMatmul(weight, bias)(x), expected, rtol=0, atol=1e-4)


def test_long_rows_are_added_up_in_parts() -> None:
    """The same numbers each time, and in one part."""
    torch.manual_seed(4)
    weight, x = random_weight(48, 2048, torch.float32, "int4", 128), torch.randn(5, 2048, device=DEVICE)
    bias = torch.randn(48, device=DEVICE)
    product = QuantizedMatmul(weight, bias)
    assert product._split(1)[1] > 1
    found = product(x)
    assert found.equal(product(x))
    product._programs = 0
    torch.testing.assert_close(found, product(x), rtol=0, atol=1e-5)
    check(5, 48, 2048, "int4", 128, with_bias=True)


@pytest.mark.parametrize("count", [1, 4, 5, 16, 64, 1000])
def test_parts_have_all_tiles_and_none_is_empty(count: int) -> None:
    product = QuantizedMatmul(random_weight(16, count * 64, torch.float32, "int8"), None)
    for programs in (1, 3, 100):
        each, parts = product._split(programs)
        assert (parts - 1) * each < count <= parts * each


def test_numbers_of_an_element_are_of_columns_side_by_side() -> None:
    values = torch.arange(16, dtype=torch.uint8).repeat(3, 2)[:, :24]
    packed = pack(values, 4, 2)
    assert packed.shape == (3, 6)
    assert packed[0, :2].tolist() == [0 | 2 << 4 | 4 << 8 | 6 << 12, 1 | 3 << 4 | 5 << 8 | 7 << 12]
    filled = pack(values, 4, 4)[:, 4:]
    assert (filled & 15).equal(torch.arange(4, dtype=torch.int16).repeat(3, 1))
    assert not (filled >> 8).any()
    bytes_of_two = pack(values + 100, 8, 2)
    assert bytes_of_two[0, :2].tolist() == [100 | 102 << 8, 101 | 103 << 8]


def test_no_rows_and_more_dimensions() -> None:
    product = QuantizedMatmul(random_weight(32, 64, torch.float32, "int4", 32), None)
    assert product(torch.empty(0, 64, device=DEVICE)).shape == (0, 32)
    x = torch.randn(2, 3, 128, device=DEVICE)[..., ::2]
    assert product(x).shape == (2, 3, 32)
    assert product(x)[1, 2].equal(product(x[1])[2])


@pytest.mark.parametrize("rows", range(1, 200, 7))
def test_tiles_hold_the_rows_up_to_the_largest(rows: int) -> None:
    choice = tiles(rows, torch.float16)
    assert choice.block_m >= min(rows, 128)
    assert choice.block_m & (choice.block_m - 1) == 0


def test_projections_and_tables_of_int8() -> None:
    torch.manual_seed(2)
    weight, bias, x = (torch.randn(shape, device=DEVICE) for shape in ((40, 24), (40,), (5, 24)))
    quantized, ops = quantize(weight), TritonOps()
    plain = quantized.dequantize()
    close = {"rtol": 0, "atol": 1e-4}
    torch.testing.assert_close(ops.linear(quantized, bias, "relu")(x), F.linear(x, plain, bias).relu(), **close)
    gate, up = F.linear(x, plain, bias).chunk(2, -1)
    torch.testing.assert_close(ops.gated_linear(quantized, bias, "silu")(x), F.silu(gate) * up, **close)
    table, indices = ops.table(quantized), torch.tensor([3, 39, 0], device=DEVICE)
    assert table.rows(indices).equal(plain[indices])
    torch.testing.assert_close(table.logits(x), F.linear(x, plain), **close)


def test_groups_that_the_kernel_does_not_take_are_dequantized(caplog: pytest.LogCaptureFixture) -> None:
    weight, x = random_weight(32, 48, torch.float32, "int4", 24), torch.randn(2, 48, device=DEVICE)
    for _ in range(2):
        assert TritonOps().linear(weight, None)(x).equal(F.linear(x, weight.dequantize()))
    assert [record.getMessage()[:48] for record in caplog.records] == [
        "quantized weights in groups of 24 columns are st"
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["int4", "int8", "float8"])
@pytest.mark.parametrize("rows", [1, 33, 256, 2048])
@pytest.mark.parametrize(
    ("n", "k", "group_size"), [(4096, 1024, 128), (1024, 3072, 32), (24576, 4096, 128), (4096, 12288, None)]
)
def test_real_shapes(n: int, k: int, group_size: int | None, rows: int, kind: str, dtype: torch.dtype) -> None:
    check(rows, n, k, kind, group_size, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [8, DEQUANTIZED_ROWS])
def test_a_graph_holds_the_product(rows: int) -> None:
    from workers.engine.cuda.graphs import CudaRecorder

    weight = random_weight(256, 4096, torch.bfloat16, "int4", 128)
    product, x = QuantizedMatmul(weight, None), torch.zeros(rows, 4096, device=DEVICE, dtype=torch.bfloat16)
    found: list[Tensor] = []
    replay = CudaRecorder()(lambda: found.append(product(x)))
    x.normal_()
    replay()
    assert found[-1].equal(product(x))
