"""Load models that pool: the family's layers, then the modules or the head after them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from workers.engine.checkpoint.model_checkpoint import ModelCheckpoint
from workers.engine.checkpoint.readers import weight_readers
from workers.engine.checkpoint.tensor_files import tensor_readers, weight_files
from workers.engine.layers.base import Ops, Projection
from workers.engine.layers.weights import Weights
from workers.engine.models.head import load_dense
from workers.engine.models.pooling import Pooler, PoolingModel
from workers.engine.models.pooling_config import DenseConfig, PoolingConfig
from workers.engine.models.registry import Family

logger = logging.getLogger(__name__)


def load_pooling_model(
    checkpoint: ModelCheckpoint, dtype: torch.dtype, device: torch.device, max_model_len: int, ops: Ops
) -> PoolingModel:
    """Read the tensors and build the model. Raises ModelLoadError."""
    config, family = checkpoint.config, checkpoint.family
    assert config.pooling is not None
    if not isinstance(family, Family):
        return _load_padded(checkpoint, Weights({}, dtype, device, ops=ops))
    readers = {_todays_name(name): reader for name, reader in weight_readers(checkpoint).items()}
    weights = Weights(readers, dtype, device, family.prefix, ops)
    trunk = family.build(checkpoint.raw, config, weights, max_model_len)
    transforms = _load_modules(config.pooling, weights)
    if config.pooling.labels:
        transforms = family.head(checkpoint.raw, config, weights, len(config.pooling.labels))
    _warn_of_unused(weights, checkpoint)
    return PoolingModel(config, trunk, Pooler(config.pooling, transforms))


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
    return PoolingModel(config, trunk, Pooler(config.pooling, _load_modules(config.pooling, weights)))


def _load_modules(pooling: PoolingConfig, model: Weights) -> Sequence[Projection]:
    return [_load_module(dense, model) for dense in pooling.dense]


def _load_module(dense: DenseConfig, model: Weights) -> Projection:
    weights = Weights(tensor_readers(dense.folder), torch.float32, model.device)
    return load_dense(weights, "linear", dense.size_in, dense.size_out, bias=dense.bias, activation=dense.activation)


def _todays_name(name: str) -> str:
    """Return a tensor's current name; checkpoints from TensorFlow have other names for norms."""
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def _warn_of_unused(weights: Weights, checkpoint: ModelCheckpoint) -> None:
    """Log unused tensors of layers; unused heads of other tasks are normal."""
    unused = [name for name in weights.unused() if ".layer" in name or name.startswith("layers.")]
    if unused:
        logger.warning(
            "%s does not use %d tensors of %s, the first is %s",
            checkpoint.config.architecture, len(unused), checkpoint.folder, unused[0],
        )  # fmt: skip
