"""A minimal kernel, run at start to check that Triton, its compiler and the driver work."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def run_smoke_test(device: torch.device) -> None:
    """Run a kernel on the device. Raise Triton's error if that fails."""
    out = torch.zeros(1, dtype=torch.int32, device=device)
    _write_one[(1,)](out)
    if out.item() != 1:
        raise RuntimeError("a kernel ran and wrote nothing")


@triton.jit
def _write_one(out):
    tl.store(out, 1)
