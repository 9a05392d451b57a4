"""The CPU backend: kernels in C for layers, attention and grammar masks."""

from __future__ import annotations

import torch

from workers.engine.attention.base import Attention, CacheShape
from workers.engine.backends.torch import TorchBackend
from workers.engine.layers.base import Ops
from workers.engine.messages.errors import ModelLoadError
from workers.engine.native.attention import CpuAttention
from workers.engine.native.build import NativeUnavailable
from workers.engine.native.checks import attention_matches_torch
from workers.engine.native.draw import NativeDraw
from workers.engine.native.library import load
from workers.engine.native.ops import NativeOps
from workers.engine.sampling.base import Draw

_DTYPES = (torch.bfloat16, torch.float32)


class CpuBackend(TorchBackend):
    name = "cpu"
    widens = True
    ops: Ops = NativeOps()

    def unfit(self, device: torch.device, dtype: torch.dtype) -> str | None:
        why = _missing(dtype)
        return None if why is None else f"there are no CPU kernels ({why})"

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        if device.type != "cpu":
            raise ModelLoadError(
                f"the cpu backend is for the device cpu, and the device is {device}; choose attention_backend auto"
            )
        why = _missing(dtype)
        if why is not None:
            raise ModelLoadError(f"the cpu backend cannot be had: {why}; choose attention_backend auto or torch")

    def stores_bf16(self) -> bool:
        return _missing(torch.float32) is None and attention_matches_torch(torch.float32)

    def attention(self, shape: CacheShape, num_heads: int, dtype: torch.dtype, device: torch.device) -> Attention:
        if not attention_matches_torch(dtype):
            return super().attention(shape, num_heads, dtype, device)
        return CpuAttention(shape, num_heads, dtype)

    def draw(self, num_slots: int, vocab_size: int, device: torch.device) -> Draw:
        return NativeDraw(num_slots, vocab_size)


def _missing(dtype: torch.dtype) -> str | None:
    """Return why there are no CPU kernels for a model of `dtype`; None if there are."""
    if dtype not in _DTYPES:
        return f"its kernels compute in bfloat16 and float32, and the dtype is {str(dtype).removeprefix('torch.')}"
    try:
        load()
    except NativeUnavailable as error:
        return str(error)
    return None
