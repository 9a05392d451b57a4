"""The tensors of a checkpoint by name, as a model's code expects them."""

from __future__ import annotations

from workers.engine.checkpoint.dtypes import stored_dtype
from workers.engine.checkpoint.model_checkpoint import ModelCheckpoint
from workers.engine.checkpoint.quantized_checkpoint import plain_readers
from workers.engine.checkpoint.quantized_matrix import Reader
from workers.engine.checkpoint.tensor_files import tensor_readers


def weight_readers(checkpoint: ModelCheckpoint) -> dict[str, Reader]:
    """Return a reader for each tensor of the plain checkpoint, by name.

    Quantized tensors are dequantized to the checkpoint's dtype.
    """
    readers = tensor_readers(checkpoint.folder)
    if checkpoint.quantized is None:
        return readers
    return plain_readers(readers, checkpoint.quantized, stored_dtype(checkpoint.config))
