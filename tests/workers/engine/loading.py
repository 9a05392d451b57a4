"""Models of checkpoints, without an engine."""

import torch

from workers.engine.checkpoint.decoder_loader import load_weights
from workers.engine.checkpoint.dtypes import resolve_dtype
from workers.engine.checkpoint.model_checkpoint import open_checkpoint
from workers.engine.layers.base import Ops
from workers.engine.models.base import DecoderModel


def load_model(
    name: str, dtype: str, device: torch.device, max_model_len: int | None = None, ops: Ops | None = None
) -> DecoderModel:
    """Return the model of a folder, ready to run."""
    checkpoint = open_checkpoint(name)
    return load_weights(checkpoint, resolve_dtype(dtype, checkpoint.config, device), device, max_model_len, ops)
