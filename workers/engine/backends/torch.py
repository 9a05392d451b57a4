"""The torch backend: plain torch, for every device."""

from __future__ import annotations

import torch

from workers.engine.attention.base import Attention, CacheShape
from workers.engine.attention.reference import TorchAttention
from workers.engine.backends.base import Backend
from workers.engine.inputs.base import Inputs
from workers.engine.inputs.host import HostInputs
from workers.engine.layers.base import Ops
from workers.engine.layers.ops import TorchOps
from workers.engine.messages.cache_groups import CacheGroups
from workers.engine.sampling.base import Draw
from workers.engine.sampling.draw import TorchDraw


class TorchBackend(Backend):
    name = "torch"
    records = False
    ops: Ops = TorchOps()

    def attention(self, shape: CacheShape, num_heads: int, dtype: torch.dtype, device: torch.device) -> Attention:
        return TorchAttention(shape, num_heads, dtype, device)

    def inputs(self, num_slots: int, max_model_len: int, groups: CacheGroups, device: torch.device) -> Inputs:
        return HostInputs(num_slots, max_model_len, groups, device)

    def draw(self, num_slots: int, vocab_size: int, device: torch.device) -> Draw:
        return TorchDraw(num_slots, vocab_size)
