"""The bytes of a checkpoint's weights in memory, before they are read."""

from __future__ import annotations

import torch

from workers.engine.checkpoint.dtypes import stored_dtype
from workers.engine.checkpoint.model_checkpoint import ModelCheckpoint
from workers.engine.checkpoint.quantized_checkpoint import count_bytes
from workers.engine.checkpoint.tensor_files import tensor_shapes, weight_files
from workers.engine.models.registry import Family


def weight_bytes(
    checkpoint: ModelCheckpoint,
    dtype: torch.dtype,
    widens: bool = False,
    quantization: str | None = None,
    *,
    integers: bool = False,
    float8: bool = False,
) -> int:
    """Estimate the bytes of the weights in a model that computes in `dtype`.

    - `widens`: the backend stores weights in fewer bits where it can, and integers as in the
      checkpoint
    - `integers`, `float8`: the backend stores such weights as in the checkpoint
    - `quantization`: the value of the flag

    None of them applies to transformers' classes, which keep some matrices as they are. Raises
    ModelLoadError if there are no weights.
    """
    stored, size = stored_dtype(checkpoint.config), dtype.itemsize
    if isinstance(checkpoint.family, Family):
        size = 1 if quantization else min(size, stored.itemsize) if widens else size
    if checkpoint.quantized is not None:
        shapes = tensor_shapes(checkpoint.folder)
        return count_bytes(shapes, checkpoint.quantized, size, stays=widens or integers, float8=float8)
    return sum(file.stat().st_size for file in weight_files(checkpoint.folder)) // stored.itemsize * size
