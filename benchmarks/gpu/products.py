"""Products with quantized weights, in the shapes of a layer of Qwen3-8B, against torch's products
with bfloat16 weights.
"""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.setting import Setting
from benchmarks.gpu.timing import median_seconds
from workers.engine.cuda.graphs import CudaRecorder
from workers.engine.kernels.quantized_matmul import QuantizedMatmul
from workers.engine.layers.quantized import QuantizedWeight

SHAPES = ((24576, 4096), (4096, 12288), (6144, 4096))  # outputs and inputs
KINDS = {"int4": 128, "int8": None, "float8": 128}  # columns of a group
ROWS = (1, 16, 32, 64, 128, 256, 512)
JUDGED = ("int4", 64)  # kind and most rows of the row's figure
_CALLS = 20  # in one CUDA graph, so that the host launches none of them


def measure(setting: Setting) -> dict[str, Any]:
    """Time every kind, shape and number of rows; the figure is the worst ratio of `JUDGED`."""
    device = torch.device(setting.device)
    shapes, rows = (((32, 128),), (1, 16)) if setting.tiny else (SHAPES, ROWS)
    dtype = torch.float32 if setting.tiny else torch.bfloat16
    cases = []
    for kind, group_size in KINDS.items():
        for shape in shapes:
            weight = _weight(kind, shape, group_size, dtype, device)
            ours, plain = QuantizedMatmul(weight, None), weight.dequantize().t()
            for number in rows:
                x = torch.randn(number, shape[1], device=device, dtype=dtype)
                seconds, theirs = _seconds(lambda: ours(x), device), _seconds(lambda: x @ plain, device)  # noqa: B023
                cases.append(
                    {
                        "kind": kind,
                        "shape": shape,
                        "rows": number,
                        "microseconds": round(1e6 * seconds, 1),
                        "torch_microseconds": round(1e6 * theirs, 1),
                        "ratio": round(theirs / seconds, 3),
                    }
                )
    kind, most = JUDGED
    judged = [case["ratio"] for case in cases if case["kind"] == kind and case["rows"] <= most]
    return {
        "products": cases,
        "value": min(judged),
        "how": (
            f"the quantized product in CUDA graphs of {_CALLS} calls, torch's time with the weight in bfloat16 over"
            f" ours, medians by CUDA events; the worst of {kind} with up to {most} rows over"
            f" {', '.join(f'{outputs} × {inputs}' for outputs, inputs in shapes)}"
        ),
    }


def _weight(
    kind: str, shape: tuple[int, int], group_size: int | None, dtype: torch.dtype, device: torch.device
) -> QuantizedWeight:
    size = group_size or shape[1]
    groups = (shape[0], shape[1] // size)
    scales = torch.rand(groups, device=device) / 100
    if kind == "int4":
        values, zeros = (torch.randint(0, 16, of, device=device, dtype=torch.uint8) for of in (shape, groups))
        return QuantizedWeight(values, scales, dtype, size, zeros)
    numbers = torch.randn(shape, device=device)
    values = numbers.to(torch.float8_e4m3fn) if kind == "float8" else (numbers * 30).clamp(-128, 127).to(torch.int8)
    return QuantizedWeight(values, scales, dtype, size)


def _seconds(product: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call."""

    if device.type != "cuda":
        return median_seconds(product, device, 1)

    def calls() -> None:
        for _ in range(_CALLS):
            product()

    return median_seconds(CudaRecorder()(calls), device, 1) / _CALLS
