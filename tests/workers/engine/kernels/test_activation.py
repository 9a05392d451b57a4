"""The gated activation against torch's."""

import pytest
import torch
import torch.nn.functional as F

from tests.workers.engine.kernels.devices import DEVICE
from workers.engine.kernels.activation import silu_times_up
from workers.engine.kernels.ops import TritonOps
from workers.engine.layers.ops import TorchOps


def check(tokens: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    gate_up = torch.randn(tokens, 2 * width, device=DEVICE).mul(4).to(dtype)
    gate_up[0, :4] = torch.tensor([-80.0, 80.0, 0.0, -30.0])
    gate, up = gate_up.float().chunk(2, -1)
    tolerance = 2e-6 if dtype == torch.float32 else 1 / 128
    torch.testing.assert_close(silu_times_up(gate_up).float(), F.silu(gate) * up, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "width"), [(3, 40), (2, 1536), (1, 1024)])
def test_equals_torch(tokens: int, width: int, dtype: torch.dtype) -> None:
    check(tokens, width, dtype)


@pytest.mark.parametrize("name", ["silu", "swish", "gelu", "gelu_pytorch_tanh"])
def test_every_name_gives_what_torch_gives(name: str) -> None:
    gate_up = torch.randn(2, 64, device=DEVICE)
    torch.testing.assert_close(
        TritonOps().gated_activation(name, gate_up.clone()), TorchOps().gated_activation(name, gate_up.clone())
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "width"), [(16384, 3072), (1024, 14336), (1, 8960)])
def test_real_shapes(tokens: int, width: int, dtype: torch.dtype) -> None:
    check(tokens, width, dtype)
