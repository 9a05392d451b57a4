"""Build the model of a checkpoint from its tensors, or only from their shapes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workers.engine.checkpoint.model_checkpoint import ModelCheckpoint
from workers.engine.checkpoint.random_weights import RandomWeights
from workers.engine.checkpoint.readers import plain_shape_readers, weight_readers
from workers.engine.checkpoint.tensor_files import tensor_readers
from workers.engine.layers.base import Ops, Projection
from workers.engine.layers.parallel import Parallel
from workers.engine.layers.weights import Weights
from workers.engine.models.base import DecoderModel
from workers.engine.models.head import load_dense
from workers.engine.models.pooling import Pooler, PoolingModel
from workers.engine.models.pooling_config import DenseConfig, PoolingConfig
from workers.engine.models.registry import Family


def open_weights(
    checkpoint: ModelCheckpoint,
    dtype: torch.dtype,
    device: torch.device,
    ops: Ops | None = None,
    parallel: Parallel | None = None,
) -> Weights:
    """Return the tensors of a checkpoint for code of the engine's own.

    On the device "meta" they have shapes and no numbers. Raises ModelLoadError.
    """
    assert isinstance(checkpoint.family, Family)
    prefix = checkpoint.family.prefix
    if checkpoint.dummy:
        return RandomWeights(checkpoint.quantized, checkpoint.stored_dtype, dtype, device, prefix, ops, parallel)
    readers = plain_shape_readers(checkpoint) if device.type == "meta" else weight_readers(checkpoint)
    if checkpoint.config.pooling is not None:
        readers = {_todays_name(name): reader for name, reader in readers.items()}
    return Weights(readers, dtype, device, prefix, ops, parallel)


def build_model(checkpoint: ModelCheckpoint, weights: Weights, max_model_len: int) -> DecoderModel | PoolingModel:
    """Return the model by code of the engine's own. Raises ModelLoadError."""
    config, family = checkpoint.config, checkpoint.family
    assert isinstance(family, Family)
    trunk = family.build(checkpoint.raw, config, weights, max_model_len)
    if config.pooling is None:
        assert isinstance(trunk, DecoderModel)
        return trunk
    transforms = load_modules(config.pooling, weights)
    if config.pooling.labels:
        transforms = family.head(checkpoint.raw, config, weights, len(config.pooling.labels))
    return PoolingModel(config, trunk, Pooler(config.pooling, transforms))


def load_modules(pooling: PoolingConfig, model: Weights) -> Sequence[Projection]:
    """Return the modules of sentence-transformers after the pooling. Raises ModelLoadError."""
    return [_load_module(dense, model) for dense in pooling.dense]


def _load_module(dense: DenseConfig, model: Weights) -> Projection:
    weights = model.beside(lambda: tensor_readers(dense.folder))
    return load_dense(weights, "linear", dense.size_in, dense.size_out, bias=dense.bias, activation=dense.activation)


def _todays_name(name: str) -> str:
    """Return a tensor's current name; checkpoints from TensorFlow have other names for norms."""
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
