"""The size of a model's KV cache."""

import torch

from workers.engine.device.cache_plan import cache_groups
from workers.engine.models.config import ModelConfig


def block_bytes(model: ModelConfig, dtype: torch.dtype, block_size: int) -> int:
    """Return the bytes of one block of the grid in all layers."""
    groups = cache_groups(model, dtype, block_size)
    return groups.page_bytes * sum(group.pages for group in groups.groups)
