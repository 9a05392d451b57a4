"""The interface of backends."""

from __future__ import annotations

from typing import Protocol

import torch

from workers.engine.attention.base import Attention, CacheShape
from workers.engine.inputs.base import Inputs
from workers.engine.layers.base import Ops
from workers.engine.messages.cache_groups import CacheGroups
from workers.engine.sampling.base import Draw


class Backend(Protocol):
    """Creates the parts that compute a model and its steps; it has no state."""

    name: str

    records: bool
    """Whether its inputs and its draw run entirely on the device, so that CUDA graphs can record
    them.
    """

    widens: bool = False
    """Whether its float32 arithmetic reads weights stored in 16 bits."""

    def unfit(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return why a model of `dtype` does not run with it by default; None if it does."""
        return None

    def check(self, device: torch.device, dtype: torch.dtype) -> None:
        """Raise ModelLoadError if it cannot run a model of `dtype`."""
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
        """Return attention in `dtype`; the shape's dtype may differ if the backend `stores_bf16` or
        `stores_fp8`.
        """
        ...

    def inputs(self, num_slots: int, max_model_len: int, groups: CacheGroups, device: torch.device) -> Inputs:
        """Return the inputs of steps, with a block table for each column of the groups."""
        ...

    def draw(self, num_slots: int, vocab_size: int, device: torch.device) -> Draw: ...
