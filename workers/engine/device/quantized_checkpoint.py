"""A quantized checkpoint's tensors as the plain ones that a model's code asks for: each matrix is
computed from its parts when it is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.engine.device.compressed_tensors import CompressedTensorsFormat
from workers.engine.device.quantized_formats import (
    EMBEDDINGS,
    AwqFormat,
    CheckpointFormat,
    Fp8Format,
    GptqFormat,
    unreadable,
)
from workers.engine.device.quantized_matrix import MatrixLayout, MatrixParts, Reader
from workers.engine.layers.quantized import QuantizedWeight
from workers.engine.messages.errors import ModelLoadError
from workers.engine.models.config import Json

_FORMATS: dict[str, Callable[[Json], CheckpointFormat]] = {
    "awq": AwqFormat,
    "compressed-tensors": CompressedTensorsFormat,
    "fp8": Fp8Format,
    "gptq": GptqFormat,
}
# The keys of config.json with the method where the settings name none; the second one is of the
# first versions of compressed-tensors
_KEYS = {"quantization_config": "no known method", "compression_config": "compressed-tensors"}
_WEIGHT = "weight"
_SCALES = ("scales", "weight_scale", "weight_scale_inv")
# How the names of modules end whose matrices are dequantized everywhere
_TABLES = ("lm_head", *EMBEDDINGS)
_GROUP_BYTES = {4: 5, 8: 4}  # in memory, of a row's scale and zero point of a group, by bits


def find_format(raw: Json) -> CheckpointFormat | None:
    """Return how a checkpoint is quantized by its config.json; None where it is not.

    Raises ModelLoadError where it cannot be read.
    """
    key = next((key for key in _KEYS if raw.get(key)), None)
    if key is None:
        return None
    settings = raw[key]
    if not isinstance(settings, dict):
        raise ModelLoadError(f"config.json has a {key} that is no JSON object")
    method = str(settings.get("quant_method") or ("bitsandbytes" if _is_bitsandbytes(settings) else _KEYS[key]))
    if method not in _FORMATS:
        raise unreadable(method)
    return _FORMATS[method](settings)


def _is_bitsandbytes(settings: Json) -> bool:
    return bool(settings.get("load_in_4bit") or settings.get("load_in_8bit"))


def plain_readers(
    readers: Mapping[str, Reader], checkpoint_format: CheckpointFormat, dtype: torch.dtype
) -> dict[str, Reader]:
    """Return functions that read the tensors of the plain checkpoint by name: quantized matrices
    are computed when they are read, and given in `dtype`.

    Raises ModelLoadError, as the functions do, which names the tensor.
    """
    plain = {name: reader for name, reader in readers.items() if _part(name) not in checkpoint_format.parts}
    for module, names in _modules(readers, checkpoint_format).items():
        parts = MatrixParts(module, {_part(name): readers[name] for name in names})
        layout = checkpoint_format.layout(module, [_part(name) for name in names])
        if layout is not None:
            parts.require(layout.required)
            plain[parts.name_of(_WEIGHT)] = _MatrixReader(parts, layout, dtype)
    return plain


def count_bytes(
    shapes: Mapping[str, Sequence[int]],
    checkpoint_format: CheckpointFormat,
    item_size: int,
    stays: bool,
    float8: bool = False,
) -> int:
    """Return about how many bytes the weights take by the shapes of the stored tensors: `item_size`
    for each number of the plain checkpoint, or as many bits as it is stored in if it `stays` so,
    and one byte if it is in float8 and that stays.

    Raises ModelLoadError.
    """
    layouts = {}
    for module, names in _modules(shapes, checkpoint_format).items():
        layout = checkpoint_format.layout(module, [_part(name) for name in names])
        if layout is not None:
            layouts[module] = layout
    count = 0
    for name, shape in shapes.items():
        module, _, part = name.rpartition(".")
        layout, numbers = layouts.get(module), math.prod(shape)
        bits = None if layout is None or module.endswith(_TABLES) else _kept_bits(layout, stays, float8)
        if layout is not None and part == layout.stored:
            count += numbers * layout.packed * (bits or 8 * item_size) // 8
        elif layout is not None and bits and part in _SCALES:
            rows, *_ = shapes.get(f"{module}.{layout.stored}") or (1,)  # its reader refuses what is amiss
            count += numbers * min(layout.scaled_rows or rows, rows) * _GROUP_BYTES[bits]
        elif part not in checkpoint_format.parts:
            count += numbers * item_size
    return count


def _kept_bits(layout: MatrixLayout, stays: bool, float8: bool) -> int | None:
    return 8 if layout.float8 and float8 else layout.bits if stays else None


def _modules(names: Iterable[str], checkpoint_format: CheckpointFormat) -> dict[str, list[str]]:
    """Return the names of the tensors of each module that may have a quantized matrix."""
    modules: dict[str, list[str]] = {}
    for name in names:
        if _part(name) == _WEIGHT or _part(name) in checkpoint_format.parts:
            modules.setdefault(name.rpartition(".")[0], []).append(name)
    return modules


def _part(name: str) -> str:
    return name.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class _MatrixReader:
    """A QuantizedReader."""

    parts: MatrixParts
    layout: MatrixLayout
    dtype: torch.dtype

    def __call__(self) -> Tensor:
        return self.layout.read(self.parts).dequantize(self.dtype)

    @property
    def bits(self) -> int | None:
        return self.layout.bits

    def quantized(self) -> QuantizedWeight | None:
        return None if self.bits is None else self.layout.read(self.parts).as_stored(self.dtype)

    def float8(self) -> QuantizedWeight | None:
        layout = self.layout
        return layout.read(self.parts).as_float8(self.dtype, layout.float8_inputs) if layout.float8 else None
