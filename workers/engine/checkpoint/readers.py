"""The tensors of a checkpoint by name, as a model's code expects them."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from workers.engine.checkpoint.model_checkpoint import ModelCheckpoint
from workers.engine.checkpoint.quantized_checkpoint import plain_readers
from workers.engine.checkpoint.quantized_matrix import Reader
from workers.engine.checkpoint.tensor_files import shape_readers, tensor_readers
from workers.engine.models.text_part import text_names

logger = logging.getLogger(__name__)


def weight_readers(checkpoint: ModelCheckpoint) -> dict[str, Reader]:
    """Return a reader for each tensor of the plain checkpoint, by name.

    Quantized tensors are dequantized to the checkpoint's dtype. Of a checkpoint that takes more
    than text, these are the tensors of its text model.
    """
    readers = tensor_readers(checkpoint.folder)
    others = len(readers) - len(text_names(readers)) if checkpoint.text_only else 0
    if others:
        logger.info("%s takes text only: %d tensors of other parts are left unread", checkpoint.folder, others)
    return _of_text(checkpoint, readers)


def plain_shape_readers(checkpoint: ModelCheckpoint) -> dict[str, Reader]:
    """Return the same by `shape_readers`: tensors without numbers."""
    return _of_text(checkpoint, shape_readers(checkpoint.folder))


def _of_text(checkpoint: ModelCheckpoint, readers: Mapping[str, Reader]) -> dict[str, Reader]:
    """Return the plain readers of the tensors of a text model, by its own names for them."""
    if not checkpoint.text_only:
        return _plain(checkpoint, readers)
    plain = _plain(checkpoint, {name: readers[name] for name in text_names(readers)})
    return {own: plain[name] for name, own in text_names(plain).items()}


def _plain(checkpoint: ModelCheckpoint, readers: Mapping[str, Reader]) -> dict[str, Reader]:
    if checkpoint.quantized is None:
        return dict(readers)
    return plain_readers(readers, checkpoint.quantized, checkpoint.stored_dtype)
