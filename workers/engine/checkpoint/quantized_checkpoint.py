"""Read a quantized checkpoint as the plain tensors that a model's code expects.

Each matrix is computed from its parts when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.engine.checkpoint.compressed_tensors import CompressedTensorsFormat
from workers.engine.checkpoint.quantized_formats import (
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
