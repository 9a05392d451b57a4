"""Compare products with torch's before they are used: kernels or libraries may fail on a GPU, or
differ there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from workers.engine.cuda.out_of_memory import one_line
from workers.engine.layers.base import Projection
from workers.engine.layers.quantized import QuantizedWeight

_TOLERANCE = 1 / 100  # relative to a row's largest result, for bfloat16


def fault_of(
    make: Callable[[QuantizedWeight, None], Projection],
    weight: QuantizedWeight,
    x: Tensor,
    rows: Sequence[int],
    device: torch.device,
) -> str:
    """Return why products cannot be used on a device, "" if they can.

    Products of different numbers of rows of x are compared with those of the dequantized weight; x
    is exact in the weight's dtype.
    """
    expected = x.double() @ replace(weight, dtype=torch.float64).dequantize().t()
    try:
        product = make(weight.to(device), None)
        found = (
            torch.cat([product(part.to(device, weight.dtype)) for part in x.split_with_sizes(list(rows))])
            .cpu()
            .double()
        )
    except Exception as error:  # any error of torch, Triton or a driver
        return one_line(error)
    is_right = ((found - expected).abs() <= _TOLERANCE * expected.abs().amax(1, keepdim=True)).all()
    return "" if is_right else "its products differ from torch's others"
