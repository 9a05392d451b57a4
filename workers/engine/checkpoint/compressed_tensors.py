"""Read checkpoints of compressed-tensors, whose configuration quantizes modules by groups.

The reader uses the settings of weights, and whether activations are in float8. It ignores all other
settings of activations and those of the KV cache. Layouts: compressed-tensors, `compressors/` and
`quantization/lifecycle/forward.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from workers.engine.checkpoint.quantized_formats import (
    EMBEDDINGS,
    FLOAT8,
    CheckpointFormat,
    block_shape,
    malformed,
    matches,
    read_object,
    read_scaled,
    read_strings,
    unreadable,
)
from workers.engine.checkpoint.quantized_matrix import (
    INDICES,
    SCALES,
    WORDS,
    MatrixLayout,
    MatrixParts,
    QuantizedMatrix,
    StoredNumbers,
    bits_as_stored,
    count_groups,
    groups_in_order,
    numbers_in,
    unpack,
    words,
)
from workers.engine.messages.errors import ModelLoadError
from workers.engine.models.config import Json

_METHOD = "compressed-tensors"
_PACKED = "pack-quantized"
_FORMATS = ("int-quantized", "float-quantized", "naive-quantized", _PACKED)
_ZERO_POINTS = (torch.int8, torch.uint8, torch.int32, torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class _Scheme:
    """The quantization of one group of modules."""

    targets: tuple[str, ...]
    packed: bool
    bits: int
    floats: bool
    strategy: str  # "tensor", "channel", "group" or "block"
    group_size: int | None  # None for whole rows
    block: tuple[int, int] | None
    symmetric: bool
    has_order: bool  # the checkpoint stores the group of each column
    float8_inputs: bool

    def layout(self) -> MatrixLayout:
        zeros = () if self.symmetric else ("weight_zero_point",)
        order = ("weight_g_idx",) if self.has_order else ()
        stays = not self.floats and not self.has_order and self.strategy != "block"
        if self.packed:
            required = ("weight_packed", "weight_scale", "weight_shape", *zeros, *order)
            stays = stays and (self.bits == 4 or self.symmetric)
            bits = bits_as_stored(self.bits, self.group_size) if stays else None
            packed, read = numbers_in(1, self.bits), partial(_read_packed, self)
            return MatrixLayout("weight_packed", required, packed, read, bits, group_size=self.group_size)
        required = ("weight", "weight_scale", *zeros, *order)
        bits = bits_as_stored(8, self.group_size) if stays and self.symmetric else None
        read, columns = partial(_read_numbers, self), self.block[1] if self.block else self.group_size
        return MatrixLayout("weight", required, 1, read, bits, self.floats, self.float8_inputs, columns)


class CompressedTensorsFormat(CheckpointFormat):
    parts = frozenset(
        (
            "weight_packed",
            "weight_scale",
            "weight_zero_point",
            "weight_shape",
            "weight_g_idx",
            "weight_global_scale",
            *(f"{what}_{part}" for what in ("input", "output") for part in ("scale", "zero_point", "global_scale")),
            *(f"{what}_{part}" for what in ("q", "k", "v") for part in ("scale", "zero_point")),
        )
    )

    def __init__(self, settings: Json) -> None:
        _refuse_others(settings)
        groups = read_object(settings, "config_groups")
        self._schemes = [
            _scheme(group, str(group.get("format") or settings.get("format")))
            for group in (read_object(groups, name) for name in groups)
            if group.get("weights")
        ]
        self._ignore = read_strings(settings, "ignore")

    def layout(self, module: str, parts: Collection[str]) -> MatrixLayout | None:
        if not {"weight_scale", "weight_packed"} & set(parts) or _match_any(self._ignore, module):
            return None
        return self._scheme_of(module).layout()

    def parts_of(self, module: str) -> Collection[str]:
        scheme = None if _match_any(self._ignore, module) else self._find_scheme(module)
        return () if scheme is None else scheme.layout().required

    def _find_scheme(self, module: str) -> _Scheme | None:
        """Return the scheme with the most specific target: a name, then a pattern, then a class."""
        for fits in (_is_name, _is_match, _is_class):
            for scheme in self._schemes:
                if any(fits(target, module) for target in scheme.targets):
                    return scheme
        return None

    def _scheme_of(self, module: str) -> _Scheme:
        scheme = self._find_scheme(module)
        if scheme is not None:
            return scheme
        raise ModelLoadError(
            f"the matrix {module!r} is quantized in the checkpoint, but matches no group of config.json's"
            " quantization_config"
        )


def _refuse_others(settings: Json) -> None:
    sparsity = read_object(settings, "sparsity_config").get("format")
    if sparsity not in (None, "dense"):
        raise unreadable(f"{_METHOD} with the sparse format {sparsity!r}")
    if read_object(settings, "transform_config").get("config_groups"):
        raise unreadable(f"{_METHOD} with transforms of activations")


def _scheme(group: Json, stored: str) -> _Scheme:
    weights: Any = read_object(group, "weights")
    bits, kind, size = weights.get("num_bits"), weights.get("type", "int"), weights.get("group_size")
    if stored not in _FORMATS:
        raise unreadable(f"{_METHOD} in the format {stored!r}")
    packed = stored == _PACKED
    if (kind, bits) not in ((("int", 4), ("int", 8)) if packed else (("int", 4), ("int", 8), ("float", 8))):
        raise unreadable(f"{_METHOD} in the format {stored!r} with {bits} bits of the type {kind!r}")
    strategy = weights.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    if strategy not in ("tensor", "channel", "group", "block") or (packed and strategy == "block"):
        raise unreadable(f"{_METHOD} in the format {stored!r} with scales by {strategy!r}")
    if strategy == "group" and (not isinstance(size, int) or size < 1):
        raise malformed("group_size", size, "a positive integer")
    symmetric = bool(weights.get("symmetric", True))
    if not symmetric and (kind == "float" or strategy == "block"):
        raise unreadable(f"{_METHOD} in the format {stored!r} with zero points")
    return _Scheme(
        targets=read_strings(group, "targets"),
        packed=packed,
        bits=bits,
        floats=kind == "float",
        strategy=strategy,
        group_size=size if strategy == "group" else None,
        block=block_shape(weights.get("block_structure")) if strategy == "block" else None,
        symmetric=symmetric,
        has_order=weights.get("actorder") in ("group", "dynamic", True) and strategy == "group",
        float8_inputs=_are_float8(read_object(group, "input_activations")),
    )


def _are_float8(activations: Json) -> bool:
    return (activations.get("type"), activations.get("num_bits")) == ("float", 8)


def _read_numbers(scheme: _Scheme, parts: MatrixParts) -> QuantizedMatrix:
    """Read a matrix with one element per number."""
    dtypes = FLOAT8 if scheme.floats else (torch.int8,)
    if scheme.strategy == "block":
        return read_scaled(parts, dtypes, "weight_scale", scheme.block)
    values = parts.read("weight", dtypes, (None, None))
    rows, columns = values.shape
    matrix = _matrix(scheme, parts, StoredNumbers.plain(values))
    if scheme.symmetric:
        return matrix
    zeros = parts.read("weight_zero_point", _ZERO_POINTS, *_shapes(scheme, rows, columns))
    return replace(matrix, zeros=_by_row(zeros, rows))


def _read_packed(scheme: _Scheme, parts: MatrixParts) -> QuantizedMatrix:
    """Read a matrix of integers packed into words; each is stored plus half of the range."""
    rows, columns = _stored_shape(parts)
    packed = parts.read("weight_packed", WORDS, (rows, words(columns, scheme.bits)))
    numbers = StoredNumbers((rows, columns), torch.uint8, lambda where: unpack(packed[where], scheme.bits)[:, :columns])
    matrix = _matrix(scheme, parts, numbers)
    half = 1 << scheme.bits - 1
    if scheme.symmetric:
        return replace(matrix, zeros=torch.full((1, 1), float(half)).expand(matrix.scales.shape))
    shapes = _shapes(scheme, rows, columns)
    packed_shape = (words(rows, scheme.bits), matrix.scales.shape[1])
    zeros = parts.read("weight_zero_point", _ZERO_POINTS, *shapes, packed_shape)
    if zeros.dtype == torch.int32 and scheme.strategy != "tensor":
        if tuple(zeros.shape) != packed_shape:
            raise parts.error(
                "weight_zero_point", f"has shape {list(zeros.shape)}, but its matrix implies {list(packed_shape)}"
            )
        return replace(matrix, zeros=unpack(zeros.t(), scheme.bits).t()[:rows].float())
    by_row = _by_row(zeros, rows)
    return replace(matrix, zeros=by_row if by_row.is_meta else by_row + half)


def _matrix(scheme: _Scheme, parts: MatrixParts, values: StoredNumbers) -> QuantizedMatrix:
    """Return a matrix with its scales and the groups of its columns."""
    rows, columns = values.shape
    size = scheme.group_size or columns
    scales = _by_row(parts.read("weight_scale", SCALES, *_shapes(scheme, rows, columns)), rows)
    groups = groups_in_order(columns, size)
    if "weight_g_idx" in parts and groups is not None and not _is_unset(parts, columns):
        groups = parts.groups("weight_g_idx", columns, scales.shape[1])
    return QuantizedMatrix(values, scales, groups=groups, bits=scheme.bits)


def _is_unset(parts: MatrixParts, columns: int) -> bool:
    """Return whether all of `weight_g_idx` is -1: the groups' columns are in order."""
    return bool((parts.read("weight_g_idx", INDICES, (columns,)) == -1).all())


def _shapes(scheme: _Scheme, rows: int, columns: int) -> Sequence[tuple[int, ...]]:
    """Return the valid shapes of scales and zero points."""
    if scheme.strategy == "tensor":
        return ((), (1,), (1, 1))
    if scheme.strategy == "channel":
        return ((rows, 1), (rows,))
    return ((rows, count_groups(columns, scheme.group_size or columns)),)


def _by_row(by_group: Tensor, rows: int) -> Tensor:
    """Return scales or zero points as float32 [rows, groups]."""
    numbers = by_group.float()
    return numbers.reshape(1, 1).expand(rows, 1) if numbers.numel() == 1 else numbers.reshape(rows, -1)


def _stored_shape(parts: MatrixParts) -> tuple[int, int]:
    rows, columns = parts.read("weight_shape", INDICES, (2,)).tolist()
    if rows < 1 or columns < 1:
        raise parts.error("weight_shape", f"is [{rows}, {columns}], not a valid shape of a matrix")
    return rows, columns


def _match_any(targets: Sequence[str], module: str) -> bool:
    return any(_is_name(target, module) or _is_match(target, module) for target in targets)


def _is_name(target: str, module: str) -> bool:
    return target == module


def _is_match(target: str, module: str) -> bool:
    return target.startswith("re:") and matches(target.removeprefix("re:"), module)


def _is_class(target: str, module: str) -> bool:
    return target == ("Embedding" if module.endswith(EMBEDDINGS) else "Linear")
