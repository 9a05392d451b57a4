"""What weights become in int8, and what plain torch makes of them."""

import pytest
import torch
import torch.nn.functional as F

from workers.engine.layers.ops import TorchOps
from workers.engine.layers.quantized import quantize


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_number_is_the_nearest_step_of_its_row(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    weight = (torch.randn(50, 70) * torch.logspace(-3, 2, 50)[:, None]).to(dtype)
    quantized = quantize(weight)
    assert quantized.values.dtype == torch.int8
    assert quantized.values.abs().amax(1).eq(127).all()
    error = (quantized.values.double() * quantized.scales.double() - weight.double()).abs()
    assert (error <= quantized.scales * 0.50001).all()
    assert quantized.dequantize().dtype == dtype


def test_rows_of_zeros_and_of_the_smallest_numbers() -> None:
    weight = torch.tensor([[0.0, 0.0], [1e-45, -1e-45], [1e-38, 0.0], [3e38, -3e38]])
    plain = quantize(weight).dequantize()
    assert plain.isfinite().all()
    assert plain[0].equal(weight[0])
    torch.testing.assert_close(plain[2:], weight[2:], rtol=0.01, atol=1e-38)


def test_projections_and_tables_of_plain_torch() -> None:
    torch.manual_seed(2)
    weight, bias, x = torch.randn(40, 24), torch.randn(40), torch.randn(5, 24)
    quantized, ops = quantize(weight), TorchOps()
    plain = quantized.dequantize()
    torch.testing.assert_close(ops.linear(quantized, bias)(x), F.linear(x, plain, bias))
    torch.testing.assert_close(ops.linear(quantized, None, "relu")(x), F.linear(x, plain).relu())
    gate, up = F.linear(x, plain, bias).chunk(2, -1)
    torch.testing.assert_close(ops.gated_linear(quantized, bias, "silu")(x), F.silu(gate) * up)
    table, indices = ops.table(quantized), torch.tensor([3, 39, 0])
    assert table.rows(indices).equal(plain[indices])
    torch.testing.assert_close(table.logits(x), F.linear(x, plain))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_in_16_bits_are_those_of_the_weights_in_16_bits(dtype: torch.dtype) -> None:
    """Sums of the integers themselves would be beyond float16."""
    torch.manual_seed(3)
    weight, x = (torch.randn(64, 4096) * 0.02).to(dtype), torch.randn(64, 4096).mul(40).to(dtype)
    quantized = quantize(weight)
    found = TorchOps().linear(quantized, None)(x)
    assert (x.float() @ quantized.values.float().T).abs().max() > 65504
    torch.testing.assert_close(found, F.linear(x, quantized.dequantize()), rtol=0, atol=0)
    torch.testing.assert_close(found.float(), F.linear(x.float(), weight.float()), rtol=0.1, atol=4.0)
