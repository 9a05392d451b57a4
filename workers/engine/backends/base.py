"""What a backend is."""

from __future__ import annotations

from typing import Protocol

import torch

from workers.engine.attention.base import Attention, CacheShape
from workers.engine.inputs.base import Inputs
from workers.engine.layers.base import Ops
from workers.engine.sampling.base import Draw


class Backend(Protocol):
    """Makes the parts that a model and its steps are computed with; it keeps nothing of them."""

    name: str

    records: bool
    """Whether its inputs and its draw are made on the device alone, so that CUDA graphs may hold
    them.
    """

    widens: bool = False
    """Whether its float32 arithmetic reads weights that are stored in 16 bits."""

    def unfit(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return why a model of `dtype` does not run with it by default; None where it does."""
        return None

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        """Raise ModelLoadError where it cannot run a model of `dtype`."""
        return

    def stores_bf16(self) -> bool:
        """Return whether the KV cache may be in torch.bfloat16 under float32."""
        return False

    def stores_fp8(self, device: torch.device) -> bool:
        """Return whether the KV cache may be in torch.float8_e4m3fn."""
        return False

    @property
    def ops(self) -> Ops: ...

    def attention(self, shape: CacheShape, num_heads: int, dtype: torch.dtype, device: torch.device) -> Attention:
        """Return attention in `dtype`; that of the shape may differ where the backend `stores_bf16`
        or `stores_fp8`.
        """
        ...

    def inputs(self, num_slots: int, max_model_len: int, block_size: int, device: torch.device) -> Inputs: ...

    def draw(self, num_slots: int, vocab_size: int, device: torch.device) -> Draw: ...
