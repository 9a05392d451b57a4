"""Load models that pool: the family's layers, then the modules or the head after them."""

from __future__ import annotations

import logging

import torch

from workers.engine.checkpoint.model_build import build_model, load_modules, open_weights
from workers.engine.checkpoint.model_checkpoint import ModelCheckpoint
from workers.engine.checkpoint.tensor_files import weight_files
from workers.engine.layers.base import Ops
from workers.engine.layers.weights import Weights
from workers.engine.models.pooling import Pooler, PoolingModel
from workers.engine.models.registry import Family

logger = logging.getLogger(__name__)


def load_pooling_model(
    checkpoint: ModelCheckpoint, dtype: torch.dtype, device: torch.device, max_model_len: int, ops: Ops
) -> PoolingModel:
    """Read the tensors and build the model. Raises ModelLoadError."""
    if not isinstance(checkpoint.family, Family):
        return _load_padded(checkpoint, Weights({}, dtype, device, ops=ops))
    weights = open_weights(checkpoint, dtype, device, ops)
    model = build_model(checkpoint, weights, max_model_len)
    assert isinstance(model, PoolingModel)
    _warn_of_unused(weights, checkpoint)
    return model


def _load_padded(checkpoint: ModelCheckpoint, weights: Weights) -> PoolingModel:
    """Return a model by transformers' class, which includes its classification head.

    Only the dtype, the device and the arithmetic of `weights` are used.
    """
    weight_files(checkpoint.folder)
    from workers.engine.models.padded_model import PaddedClass, load_padded

    config = checkpoint.config
    assert isinstance(checkpoint.family, PaddedClass)
    assert config.pooling is not None
    trunk = load_padded(checkpoint.family, checkpoint.folder, config, weights)
    return PoolingModel(config, trunk, Pooler(config.pooling, load_modules(config.pooling, weights)))


def _warn_of_unused(weights: Weights, checkpoint: ModelCheckpoint) -> None:
    """Log unused tensors of layers; unused heads of other tasks are normal."""
    unused = [name for name in weights.unused() if ".layer" in name or name.startswith("layers.")]
    if unused:
        logger.warning(
            "%s does not use %d tensors of %s, the first is %s",
            checkpoint.config.architecture, len(unused), checkpoint.folder, unused[0],
        )  # fmt: skip
