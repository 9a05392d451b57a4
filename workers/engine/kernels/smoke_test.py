"""The smallest kernel, for finding out at start whether Triton, its compiler and the driver go
together.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def run_smoke_test(device: torch.device) -> None:
    """Raise whatever Triton does where it cannot run a kernel on the device."""
    out = torch.zeros(1, dtype=torch.int32, device=device)
    _write_one[(1,)](out)
    if out.item() != 1:
        raise RuntimeError("a kernel ran and wrote nothing")


@triton.jit
def _write_one(out):
    tl.store(out, 1)
