"""The bytes of a checkpoint's weights in memory, from the headers of its files."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.engine.checkpoint.dtypes import stored_dtype
from workers.engine.checkpoint.model_build import build_model, open_weights
from workers.engine.checkpoint.model_checkpoint import ModelCheckpoint
from workers.engine.checkpoint.tensor_files import weight_files
from workers.engine.layers.activation import activation as function_of
from workers.engine.layers.base import Projection, Table
from workers.engine.layers.int8_ops import Int8Ops
from workers.engine.layers.ops import TorchOps
from workers.engine.layers.parallel import Parallel
from workers.engine.layers.quantized import QuantizedWeight, Weight
from workers.engine.layers.stored_matrix import StoredMatrix
from workers.engine.models.registry import Family

_NO_DEVICE = torch.device("meta")


def weight_bytes(
    checkpoint: ModelCheckpoint,
    dtype: torch.dtype,
    widens: bool = False,
    quantization: str | None = None,
    *,
    integers: bool = False,
    float8: bool = False,
    parallel: Parallel | None = None,
) -> int:
    """Return the bytes of one rank's weights in a model that computes in `dtype`.

    The model is built without numbers, which compares the shape of each tensor with config.json.

    - `widens`: the backend stores weights in fewer bits where it can
    - `integers`, `float8`: the backend stores such weights as in the checkpoint
    - `quantization`: the value of the flag

    For transformers' classes it is an estimate from the sizes of the files. Raises ModelLoadError.
    """
    if not isinstance(checkpoint.family, Family):
        files = sum(file.stat().st_size for file in weight_files(checkpoint.folder))
        return files // stored_dtype(checkpoint.config).itemsize * dtype.itemsize
    counted = _CountedOps(widens, integers, float8)
    ops = counted if quantization is None else Int8Ops(counted)
    weights = open_weights(checkpoint, dtype, _NO_DEVICE, ops, parallel)
    build_model(checkpoint, weights, max_model_len=1)
    return counted.bytes + weights.allocated


class _CountedOps(TorchOps):
    """Counts the bytes of matrices; what it returns cannot be called."""

    def __init__(self, widens: bool, integers: bool, float8: bool) -> None:
        self.bytes = 0
        self._widens, self._integers, self._float8 = widens, integers, float8

    def linear(self, weight: Weight | StoredMatrix, bias: Tensor | None, activation: str | None = None) -> Projection:
        self._count(weight)
        if activation is not None:
            function_of(activation)
        return _not_built

    def gated_linear(self, weight: Weight | StoredMatrix, bias: Tensor | None, activation: str) -> Projection:
        return self.linear(weight, bias, activation)

    def table(self, weight: Weight | StoredMatrix) -> Table:
        self._count(weight)
        return _TableWithoutNumbers()

    def multiplies(self, bits: int | None, dtype: torch.dtype) -> bool:
        return bits is not None and self._integers

    def multiplies_float8(self, device: torch.device) -> bool:
        return self._float8

    def _count(self, weight: Weight | StoredMatrix) -> None:
        assert isinstance(weight, StoredMatrix)
        rows, columns = weight.shape
        if isinstance(weight.form, QuantizedWeight):
            zeros = weight.form.zeros is not None
            self.bytes += rows * columns * weight.form.bits // 8 + rows * weight.form.scales.shape[1] * (4 + zeros)
        else:
            dtype = weight.exact if self._widens and weight.exact is not None else weight.form.dtype
            self.bytes += rows * columns * min(dtype.itemsize, weight.form.dtype.itemsize)


class _TableWithoutNumbers:
    def rows(self, indices: Tensor) -> Tensor:
        return _not_built(indices)

    def logits(self, hidden: Tensor) -> Tensor:
        return _not_built(hidden)


def _not_built(x: Tensor) -> Tensor:
    raise AssertionError("a model without numbers does not run")
