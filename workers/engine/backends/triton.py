"""The Triton backend: the engine's own kernels, and the check that they can run.

`kernels/` needs Triton, so its modules are imported only when they are used.
"""

from __future__ import annotations

import os
import re
import subprocess
from importlib import metadata

import torch

from workers.engine.attention.base import Attention, CacheShape
from workers.engine.backends.base import Backend
from workers.engine.cuda.capability import has_float8
from workers.engine.cuda.out_of_memory import one_line
from workers.engine.inputs.base import Inputs
from workers.engine.layers.base import Ops
from workers.engine.messages.cache_groups import CacheGroups
from workers.engine.messages.errors import ModelLoadError
from workers.engine.sampling.base import Draw

# The least compute capability that Triton supports; on older GPUs, `attend` would also exceed the
# shared memory
_KERNELS_SINCE = (8, 0)
_TRITON_SINCE = (3, 6)


class TritonBackend(Backend):
    name = "triton"
    records = True

    def unfit(self, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cuda" or torch.cuda.get_device_capability(device) >= _KERNELS_SINCE:
            return None
        major, minor = torch.cuda.get_device_capability(device)
        return (
            f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor}) is too old for the engine's"
            " kernels, which need 8.0 or newer"
        )

    def stores_fp8(self, device: torch.device) -> bool:
        return has_float8(device)

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        why = self.unfit(device, dtype)
        if why is not None:
            raise ModelLoadError(why)
        require_triton(device)

    @property
    def ops(self) -> Ops:
        from workers.engine.kernels.ops import TritonOps

        return TritonOps()

    def attention(self, shape: CacheShape, num_heads: int, dtype: torch.dtype, device: torch.device) -> Attention:
        from workers.engine.kernels.paged_attention import TritonAttention
        from workers.engine.kernels.tile_choices import choices

        return TritonAttention(shape, num_heads, dtype, device, choices(shape, num_heads, dtype, device))

    def inputs(self, num_slots: int, max_model_len: int, groups: CacheGroups, device: torch.device) -> Inputs:
        from workers.engine.kernels.device_inputs import DeviceInputs

        return DeviceInputs(num_slots, max_model_len, groups, device)

    def draw(self, num_slots: int, vocab_size: int, device: torch.device) -> Draw:
        from workers.engine.kernels.fused_draw import FusedDraw

        return FusedDraw(num_slots, vocab_size, device)


def require_triton(device: torch.device) -> None:
    """Raise ModelLoadError if Triton is absent, too old or unable to run a kernel on the device."""
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ModelLoadError(
            "the triton backend needs a GPU; on a CPU choose attention_backend torch, or set TRITON_INTERPRET=1 to test"
            " kernels"
        )
    if device.type == "cuda" and os.environ.get("TRITON_INTERPRET") == "1":
        raise ModelLoadError(
            "TRITON_INTERPRET=1 runs kernels on the CPU, one element at a time; unset it to use the GPU"
        )
    needed = _triton_of_torch()
    install = f"pip install triton=={needed}" if needed else "pip install 'triton>=3.6'"
    try:
        installed = metadata.version("triton")
    except metadata.PackageNotFoundError:
        raise ModelLoadError(f"the engine's kernels need Triton, which is not installed; {install}") from None
    if _numbers(installed) < _TRITON_SINCE:
        raise ModelLoadError(f"the engine's kernels need Triton 3.6 or newer, and {installed} is installed; {install}")
    try:
        from workers.engine.kernels.smoke_test import run_smoke_test

        run_smoke_test(device)
    except Exception as error:  # any error of a compiler, a linker, a driver or mixed versions
        raise ModelLoadError(
            f"Triton {installed} cannot run a kernel on {device}: {triton_trouble(error, installed, needed)}"
        ) from error


def triton_trouble(error: Exception, installed: str, needed: str | None) -> str:
    """Return the meaning of a kernel's failure, with the remedy.

    `needed`: the version that torch was built with, if it names one.
    """
    what = one_line(error).rstrip(".")
    if isinstance(error, subprocess.CalledProcessError) or "C compiler" in what:
        return (
            f"{what}; it builds its launcher with a C compiler and Python's headers: install gcc and python3-dev, or"
            " set CC"
        )
    if needed is not None and _numbers(needed)[:2] != _numbers(installed)[:2]:
        return f"{what}; torch {torch.__version__} goes with Triton {needed}: pip install triton=={needed}"
    if "PTX" in what or "kernel image" in what:
        return f"{what}; the NVIDIA driver is older than the CUDA that this Triton compiles for: update the driver"
    return f"{what}; install torch and Triton together, as pip chooses them"


def _triton_of_torch() -> str | None:
    wanted = (re.match(r"triton\s*==\s*([\d.]+)", line) for line in metadata.requires("torch") or [])
    return next((found[1] for found in wanted if found), None)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
