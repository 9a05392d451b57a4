"""Read a quantized checkpoint as the plain tensors that a model's code expects.

Each matrix is computed from its parts when it is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.engine.checkpoint.compressed_tensors import CompressedTensorsFormat
from workers.engine.checkpoint.quantized_formats import (
    EMBEDDINGS,
    AwqFormat,
    CheckpointFormat,
    Fp8Format,
    GptqFormat,
    unreadable,
)
from workers.engine.checkpoint.quantized_matrix import MatrixLayout, MatrixParts, Reader
from workers.engine.layers.quantized import QuantizedRows
from workers.engine.messages.errors import ModelLoadError
from workers.engine.models.config import Json

_FORMATS: dict[str, Callable[[Json], CheckpointFormat]] = {
    "awq": AwqFormat,
    "compressed-tensors": CompressedTensorsFormat,
    "fp8": Fp8Format,
    "gptq": GptqFormat,
}
# The keys of config.json, each with the method if the settings name none; first versions of
# compressed-tensors have the second key
_KEYS = {"quantization_config": "no known method", "compression_config": "compressed-tensors"}
_WEIGHT = "weight"
_SCALES = ("scales", "weight_scale", "weight_scale_inv")
# Suffixes of the modules whose matrices are always dequantized
_TABLES = ("lm_head", *EMBEDDINGS)
_GROUP_BYTES = {4: 5, 8: 4}  # of a row's scale and zero point per group, in memory; by bits


def find_format(raw: Json) -> CheckpointFormat | None:
    """Return the format of a quantized checkpoint from its config.json; None for a plain one.

    Raises ModelLoadError if it cannot be read.
    """
    key = next((key for key in _KEYS if raw.get(key)), None)
    if key is None:
        return None
    settings = raw[key]
    if not isinstance(settings, dict):
        raise ModelLoadError(f"config.json has a {key} that is not a JSON object")
    method = str(settings.get("quant_method") or ("bitsandbytes" if _is_bitsandbytes(settings) else _KEYS[key]))
    if method not in _FORMATS:
        raise unreadable(method)
    return _FORMATS[method](settings)


def _is_bitsandbytes(settings: Json) -> bool:
    return bool(settings.get("load_in_4bit") or settings.get("load_in_8bit"))


def plain_readers(
    readers: Mapping[str, Reader], checkpoint_format: CheckpointFormat, dtype: torch.dtype
) -> dict[str, Reader]:
    """Return a reader for each tensor of the plain checkpoint, by name.

    Quantized matrices are computed in `dtype` when they are read. This function and the readers
    raise ModelLoadError, which names the tensor.
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
    """Estimate the bytes of the weights from the shapes of the stored tensors.

    A number of the plain checkpoint takes `item_size` bytes. If it `stays` as stored, it takes its
    stored bits, or one byte in float8. Raises ModelLoadError.
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
            rows, *_ = shapes.get(f"{module}.{layout.stored}") or (1,)  # the reader refuses a malformed tensor
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
    """A `QuantizedReader` of one matrix."""

    parts: MatrixParts
    layout: MatrixLayout
    dtype: torch.dtype

    def __call__(self) -> Tensor:
        return self.layout.read(self.parts).dequantize(self.dtype)

    @property
    def bits(self) -> int | None:
        return self.layout.bits

    def quantized(self) -> QuantizedRows | None:
        return None if self.bits is None else self.layout.read(self.parts).as_stored(self.dtype)

    def float8(self) -> QuantizedRows | None:
        layout = self.layout
        return layout.read(self.parts).as_float8(self.dtype, layout.float8_inputs) if layout.float8 else None
