"""The two rates of the GPU that every bound is computed from."""

from typing import Any

import torch

from benchmarks.gpu.setting import Setting
from benchmarks.gpu.timing import median_seconds


def measure(setting: Setting) -> dict[str, Any]:
    """Measure copy bandwidth and bf16 matrix rate."""
    device = torch.device(setting.device)
    copied, side = (1 << 20, 128) if setting.tiny else (4 << 30, 8192)
    source = torch.ones(copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * copied / median_seconds(lambda: target.copy_(source), device, calls=20)
    left, right = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    product = torch.empty_like(left)
    rate = 2 * side**3 / median_seconds(lambda: torch.mm(left, right, out=product), device, calls=50)
    return {
        "copy_bytes_per_second": bandwidth,
        "matrix_operations_per_second": rate,
        "value": round(bandwidth / 1e12, 3),
        "also": f"{rate / 1e12:.0f} TFLOP/s",
        "name": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "how": (
            f"copy of {copied / 2**30:.3g} GiB, bytes read and written; bf16 product of {side} x {side} matrices of"
            " normal numbers; medians of 5 batches by CUDA events"
        ),
    }
