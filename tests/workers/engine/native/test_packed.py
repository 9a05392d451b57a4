"""Products with packed matrices against plain ones in float, over shapes that fill no panel and no
tile.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.workers.engine.native.available import needs_native
from workers.engine.layers.activation import activation
from workers.engine.messages.errors import ModelLoadError
from workers.engine.native.ops import NativeOps
from workers.engine.native.packed import ACTIVATIONS, PackedMatrix, can_pack

pytestmark = [needs_native, pytest.mark.usefixtures("products")]

SHAPES = [
    (1, 32, 2),
    (2, 33, 6),
    (12, 100, 64),
    (13, 31, 770),
    (64, 96, 130),
    (100, 2304, 768),
    (700, 65, 1026),
    (30, 70, 6000),
]
# rows, outputs, inputs: the last but one takes three blocks of rows, the last has rows too long for
# blocks


def operands(rows: int, outputs: int, inputs: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(rows + outputs + inputs)
    return (
        torch.randn(rows, inputs).bfloat16(),
        (torch.randn(outputs, inputs) * inputs**-0.5).bfloat16(),
        torch.randn(outputs).bfloat16(),
    )


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), SHAPES)
def test_equals_torch(rows: int, outputs: int, inputs: int, threads: int) -> None:
    torch.set_num_threads(threads)
    x, weight, bias = operands(rows, outputs, inputs)
    expected = F.linear(x.float(), weight.float(), bias.float())
    torch.testing.assert_close(PackedMatrix(weight, bias, to_float=True)(x), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(PackedMatrix(weight, bias)(x), expected.bfloat16(), rtol=1 / 128, atol=1e-5)
    torch.testing.assert_close(
        PackedMatrix(weight)(x), F.linear(x.float(), weight.float()).bfloat16(), rtol=1 / 128, atol=1e-5
    )


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activations(name: str) -> None:
    x, weight, bias = operands(13, 66, 64)
    before = F.linear(x.float() * 4, weight.float(), bias.float())
    matrix = PackedMatrix(weight, bias, name, to_float=True)
    torch.testing.assert_close(matrix(x * 4), activation(name)(before), rtol=2e-5, atol=2e-5)
    gated = PackedMatrix(weight, bias, name, gated=True, to_float=True)
    gate, up = before.chunk(2, -1)
    torch.testing.assert_close(gated(x * 4), activation(name)(gate) * up, rtol=2e-5, atol=2e-5)


def test_extreme_sums_are_activated_as_torch_does() -> None:
    x = torch.tensor([[1e30, 0], [-1e30, 0], [100, 0], [-100, 0], [torch.nan, 0], [torch.inf, 0]]).bfloat16()
    weight = torch.zeros(32, 2, dtype=torch.bfloat16)
    weight[:, 0] = 1
    for name in ("silu", "gelu", "gelu_new", "relu"):
        expected = activation(name)(x.float()[:, :1]).expand(-1, 32)
        torch.testing.assert_close(
            PackedMatrix(weight, None, name, to_float=True)(x), expected, equal_nan=True, rtol=1e-6, atol=1e-30
        )


def test_a_row_is_the_same_whatever_is_computed_beside_it() -> None:
    x, weight, bias = operands(800, 100, 1026)
    matrix = PackedMatrix(weight, bias, "gelu_new")
    together = matrix(x)
    for rows in (1, 2, 7, 12, 13, 50, 64, 650):
        assert matrix(x[:rows]).equal(together[:rows])


SMALL_STACKS = """
import torch
from workers.engine.native.packed import PackedMatrix
x, weight = torch.randn(200, 768).bfloat16(), torch.randn(256, 768).bfloat16()
matrix = PackedMatrix(weight)
assert matrix(x)[:12].equal(matrix(x[:12]))
"""


@pytest.mark.proof
def test_threads_need_no_large_stacks() -> None:
    settings = {"OMP_STACKSIZE": "256k", "OMP_NUM_THREADS": "4"}
    run = [sys.executable, "-c", SMALL_STACKS]
    done = subprocess.run(run, cwd=Path(__file__).parents[4], env=os.environ | settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_calls_at_the_same_time_gather_apart() -> None:
    torch.set_num_threads(2)
    products = [(PackedMatrix(weight), x) for x, weight, _ in (operands(300, 256 + n, 512) for n in range(4))]
    expected = [matrix(x) for matrix, x in products]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            assert all(map(torch.equal, pool.map(lambda product: product[0](product[1]), products), expected))


def test_rows_are_the_weight_s() -> None:
    _, weight, _ = operands(1, 100, 64)
    indices = torch.randint(0, 100, (130,))
    assert PackedMatrix(weight).rows(indices).equal(weight[indices])


def test_inputs_with_more_dimensions_and_gaps() -> None:
    x, weight, _ = operands(12, 40, 64)
    matrix = PackedMatrix(weight)
    assert matrix(x.view(3, 4, 64)).equal(matrix(x).view(3, 4, 40))
    assert matrix(x.repeat(1, 2)[:, :64]).equal(matrix(x))
    assert matrix(x[:0]).shape == (0, 40)


def test_what_does_not_fit_is_refused() -> None:
    matrix = PackedMatrix(operands(1, 40, 64)[1])
    for x in (torch.zeros(2, 128, dtype=torch.bfloat16), torch.zeros(2, 64)):
        with pytest.raises(ValueError, match="rows of 64 bfloat16"):
            matrix(x)


def test_an_activation_that_is_not_known_is_refused_as_everywhere() -> None:
    weight = operands(1, 40, 64)[1]
    for refused in (
        lambda: NativeOps().linear(weight, None, "quick"),
        lambda: NativeOps().gated_linear(weight, None, "quick"),
    ):
        with pytest.raises(ModelLoadError, match="activation 'quick'; supported are"):
            refused()


def test_what_cannot_be_packed() -> None:
    assert not can_pack(torch.bfloat16, 0)
    assert not can_pack(torch.float32, 64)
    assert not can_pack(torch.bfloat16, 63)
