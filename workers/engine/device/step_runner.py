"""The common part of all runners: the backend's attention, the paged cache, and the tables for the
inputs of steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workers.engine.attention.base import CacheShape
from workers.engine.attention.context import Interruption, StepAttention, cached_layers
from workers.engine.backends.base import Backend
from workers.engine.cuda.staging import ResultCopies
from workers.engine.inputs.base import StepInputs
from workers.engine.messages.resolved_config import ResolvedConfig
from workers.engine.models.base import DecoderModel
from workers.engine.models.pooling import PoolingModel


class StepRunner:
    """Base of the runners. `interruption` abandons a step; it is None on a GPU."""

    def __init__(
        self, config: ResolvedConfig, backend: Backend, model: DecoderModel | PoolingModel, num_blocks: int
    ) -> None:
        self.device = model.device
        cache_dtype: torch.dtype = getattr(torch, config.cache_dtype)
        first = model.config.layers[0]
        shape = CacheShape(num_blocks, config.block_size, first.kv_heads, first.head_dim, cache_dtype)
        self.attention = backend.attention(shape, first.heads, model.dtype, self.device)
        self.layers = cached_layers(self.attention, model.config.layers)
        self.inputs = backend.inputs(config.max_num_seqs, config.max_model_len, config.block_size, self.device)
        self.interruption = Interruption() if self.device.type == "cpu" else None
        self._copies = ResultCopies(self.device)

    def _attend(self, inputs: StepInputs, bias: Tensor | None = None, needed: Tensor | None = None) -> StepAttention:
        """Return a step's attention; `bias` and `needed` are those of `StepAttention`."""
        return StepAttention(self.layers, [inputs.metadata], self.interruption, bias, needed)
