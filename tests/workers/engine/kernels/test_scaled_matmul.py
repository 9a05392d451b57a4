"""Products in float8 against torch's in float32, of inputs that float8 holds exactly: Triton's
interpreter rounds to it otherwise than a GPU does.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.workers.engine.kernels.devices import DEVICE
from tests.workers.engine.kernels.test_quantized_matmul import expected_product, random_weight
from workers.engine.kernels.ops import TritonOps
from workers.engine.kernels.quantized_matmul import QuantizedMatmul
from workers.engine.kernels.scaled_matmul import ScaledMatmul, can_scale, matches_torch, quantize_rows
from workers.engine.layers.quantized import QuantizedWeight

# Matrix units of a GPU add up products of float8 less exactly than float32 does.
TOLERANCE = {
    torch.float32: 1e-5 if torch.device("cpu") == DEVICE else 1e-4,
    torch.bfloat16: 1 / 100,
    torch.float16: 1 / 1000,
}


def float8_weight(n: int, k: int, dtype: torch.dtype, group_size: int | None = None) -> QuantizedWeight:
    return replace(random_weight(n, k, dtype, "float8", group_size), float8_inputs=True)


def exact_rows(rows: int, k: int, dtype: torch.dtype) -> Tensor:
    """Return rows of small integers times a power of two, of which 448 is the largest."""
    x = torch.randint(-14, 15, (rows, k), device=DEVICE).float()
    x[:, 0] = 448
    return (x * (torch.arange(rows, device=DEVICE) - 3).float().exp2()[:, None]).to(dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 16, 32), (5, 48, 64), (3, 64, 144)])
def test_equals_torch(rows: int, n: int, k: int, bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    weight, x = float8_weight(n, k, dtype), exact_rows(rows, k, dtype)
    biases = torch.randn(n, device=DEVICE).to(dtype) if bias else None
    found, expected = ScaledMatmul(weight, biases)(x), expected_product(x, weight, biases)
    assert found.dtype == dtype
    largest = expected.abs().amax(1, keepdim=True)
    assert ((found.float() - expected).abs() <= TOLERANCE[dtype] * (largest + 1)).all()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_each_row_is_scaled_to_the_largest_number(dtype: torch.dtype) -> None:
    x = exact_rows(7, 100, dtype)
    x[3] = 0
    values, scales = quantize_rows(x)
    assert values.dtype == torch.float8_e4m3fn
    assert scales.shape == (7, 1)
    assert (values.float() * scales).equal(x.float())
    assert values[[0, 1, 2, 4, 5, 6], 0].float().eq(448).all()


def test_no_rows_and_more_dimensions() -> None:
    product = ScaledMatmul(float8_weight(32, 64, torch.float32), None)
    assert product(torch.empty(0, 64, device=DEVICE)).shape == (0, 32)
    x = exact_rows(6, 64, torch.float32).view(2, 3, 64)
    assert product(x).shape == (2, 3, 32)
    assert product(x)[1, 2].equal(product(x[1])[2])


def test_what_torch_does_not_take_is_multiplied_otherwise() -> None:
    ops, bias = TritonOps(), None
    kinds = {
        "whole rows": (float8_weight(32, 64, torch.float32), ScaledMatmul),
        "inputs in 16 bits": (random_weight(32, 64, torch.float32, "float8"), QuantizedMatmul),
        "odd outputs": (float8_weight(40, 64, torch.float32), QuantizedMatmul),
        "odd inputs": (float8_weight(32, 72, torch.float32), QuantizedMatmul),
        "blocks": (float8_weight(32, 64, torch.float32, 32), QuantizedMatmul),
        "integers": (replace(random_weight(32, 64, torch.float32, "int8"), float8_inputs=True), QuantizedMatmul),
    }
    for name, (weight, kind) in kinds.items():
        assert can_scale(weight) == (kind is ScaledMatmul), name
        assert isinstance(ops.product(weight, bias), kind), name
    odd = float8_weight(32, 64, torch.float32, 24)
    x = torch.randn(2, 64, device=DEVICE)
    assert ops.linear(odd, bias)(x).equal(F.linear(x, odd.dequantize()))


@pytest.fixture
def compared_anew() -> Iterator[None]:
    matches_torch.cache_clear()
    yield
    matches_torch.cache_clear()


def refuse(*args: Tensor, **settings: torch.dtype) -> Tensor:
    raise RuntimeError("cublasLtMatmulAlgoGetHeuristic failed\nand more")


def forget_scales(x: Tensor, weight: Tensor, *scales: Tensor, out_dtype: torch.dtype) -> Tensor:
    return (x.float() @ weight.float()).to(out_dtype)


def give_no_number(x: Tensor, weight: Tensor, *scales: Tensor, out_dtype: torch.dtype) -> Tensor:
    return torch.full((x.shape[0], weight.shape[1]), float("nan"), dtype=out_dtype, device=x.device)


@pytest.mark.usefixtures("compared_anew")
@pytest.mark.parametrize("broken", [refuse, forget_scales, give_no_number])
def test_a_product_of_torch_that_is_wrong_is_not_used(
    broken: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "_scaled_mm", broken)
    weight = float8_weight(32, 64, torch.bfloat16)
    assert not any(isinstance(TritonOps().product(weight, None), ScaledMatmul) for _ in range(3))
    lines = [record.getMessage() for record in caplog.records]
    (line,) = (line for line in lines if line.startswith(f"torch._scaled_mm is not used on {DEVICE.type}"))
    assert "\n" not in line
    assert ("cublasLtMatmulAlgoGetHeuristic failed" in line) == (broken is refuse)


@pytest.mark.usefixtures("compared_anew")
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_a_product_of_torch_that_is_right_is_used(dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(TritonOps().product(float8_weight(32, 64, dtype), None), ScaledMatmul)
    assert not caplog.records


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 4096, 1024), (256, 24576, 4096), (2048, 4096, 12288)])
def test_real_shapes(rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    """Of random inputs, which are rounded as torch rounds them."""
    torch.manual_seed(rows)
    weight, x = float8_weight(n, k, dtype), torch.randn(rows, k, device=DEVICE).to(dtype)
    values, scales = quantize_rows(x)
    assert values.float().sub((x / scales).to(torch.float8_e4m3fn).float()).abs().max() <= 32
    found, expected = ScaledMatmul(weight, None)(x), expected_product(values.float() * scales, weight, None)
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=float(expected.abs().max()) / 64)


@pytest.mark.gpu
def test_a_graph_holds_the_product() -> None:
    from workers.engine.cuda.graphs import CudaRecorder

    product = ScaledMatmul(float8_weight(256, 4096, torch.bfloat16), None)
    x = torch.zeros(8, 4096, device=DEVICE, dtype=torch.bfloat16)
    found: list[Tensor] = []
    replay = CudaRecorder()(lambda: found.append(product(x)))
    x.normal_()
    replay()
    assert found[-1].equal(product(x))
