"""The tensors of a checkpoint by name, as a model's code expects them."""

from __future__ import annotations

from collections.abc import Mapping

from workers.engine.checkpoint.model_checkpoint import ModelCheckpoint
from workers.engine.checkpoint.quantized_checkpoint import plain_readers
from workers.engine.checkpoint.quantized_matrix import Reader
from workers.engine.checkpoint.tensor_files import shape_readers, tensor_readers


def weight_readers(checkpoint: ModelCheckpoint) -> dict[str, Reader]:
    """Return a reader for each tensor of the plain checkpoint, by name.

    Quantized tensors are dequantized to the checkpoint's dtype.
    """
    return _plain(checkpoint, tensor_readers(checkpoint.folder))


def plain_shape_readers(checkpoint: ModelCheckpoint) -> dict[str, Reader]:
    """Return the same by `shape_readers`: tensors without numbers."""
    return _plain(checkpoint, shape_readers(checkpoint.folder))


def _plain(checkpoint: ModelCheckpoint, readers: Mapping[str, Reader]) -> dict[str, Reader]:
    if checkpoint.quantized is None:
        return dict(readers)
    return plain_readers(readers, checkpoint.quantized, checkpoint.stored_dtype)
