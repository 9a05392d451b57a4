"""Formats of quantized checkpoints with one layout for all matrices: GPTQ, AWQ and fp8."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from workers.engine.checkpoint.quantized_matrix import (
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
)
from workers.engine.layers.weights import PLAIN_VERSION
from workers.engine.messages.errors import ModelLoadError
from workers.engine.models.config import Json

_READ = "compressed-tensors (int-, float-, naive- or pack-quantized), gptq, awq (gemm) or fp8"

FLOAT8 = (torch.float8_e4m3fn,)
EMBEDDINGS = ("embed_tokens", "embeddings")
"""Suffixes of the names of embeddings; all other matrices are of linear layers."""
_AWQ_BITS = 4
# The place of each output's number among the eight of a word in AWQ
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


class CheckpointFormat(ABC):
    """The layout of a checkpoint's matrices, from its quantization_config."""

    #: Last parts of the names of tensors that are not weights of the model.
    parts: ClassVar[frozenset[str]]

    @abstractmethod
    def layout(self, module: str, parts: Collection[str]) -> MatrixLayout | None:
        """Return the layout of a module's matrix from its stored parts; None for a plain matrix.

        Raises ModelLoadError.
        """

    @abstractmethod
    def parts_of(self, module: str) -> Collection[str]:
        """Return the parts that the configuration implies for a module; none for a plain matrix."""


class GptqFormat(CheckpointFormat):
    """GPTQ: numbers are packed along the inputs; a column holds all numbers of an output."""

    parts = frozenset(("qweight", "qzeros", "scales", "g_idx"))

    def __init__(self, settings: Json) -> None:
        self._settings = settings
        stored = settings.get("checkpoint_format") or settings.get("format") or "gptq"
        if stored not in ("gptq", "gptq_v2") or settings.get("is_marlin_format"):
            raise unreadable(f"gptq in the format {stored if stored != 'gptq' else 'marlin'!r}")
        self._offset = 0 if stored == "gptq_v2" else 1
        self._dynamic = {key: _object(changes, key) for key, changes in read_object(settings, "dynamic").items()}
        _require_bits(settings, "bits", (4, 8))
        _group_size(settings, "group_size")

    def layout(self, module: str, parts: Collection[str]) -> MatrixLayout | None:
        if not {"qweight", "qzeros", "scales"} & set(parts):
            return None
        settings = self._settings_of(module)
        bits, size = _require_bits(settings, "bits", (4, 8)), _group_size(settings, "group_size")
        ordered = bool(settings.get("desc_act")) and size is not None
        required = ("qweight", "qzeros", "scales", *(["g_idx"] if ordered else []))
        read = partial(_read_gptq, bits=bits, group_size=size, offset=self._offset)
        stays = not ordered and (bits == 4 or bool(settings.get("sym", True)))
        return MatrixLayout(
            "qweight",
            required,
            numbers_in(1, bits),
            read,
            bits_as_stored(bits, size) if stays else None,
            group_size=size,
        )

    def parts_of(self, module: str) -> Collection[str]:
        left_out = (pattern.removeprefix("-:") for pattern in self._dynamic if pattern.startswith("-:"))
        return () if any(matches(pattern, module) for pattern in left_out) else self.parts

    def _settings_of(self, module: str) -> Json:
        """Return the settings of a module, with the changes of the first matching pattern."""
        for pattern, changes in self._dynamic.items():
            if not pattern.startswith("-:") and matches(pattern.removeprefix("+:"), module):
                return {**self._settings, **changes}
        return self._settings


def _read_gptq(parts: MatrixParts, bits: int, group_size: int | None, offset: int) -> QuantizedMatrix:
    packed = parts.read("qweight", WORDS, (None, None))
    rows, columns = packed.shape[1], numbers_in(packed.shape[0], bits)
    size = group_size or columns
    groups = count_groups(columns, size)
    packed_rows = _words_of_outputs(parts, rows, bits)
    scales = parts.read("scales", SCALES, (groups, rows))
    zeros = parts.read("qzeros", WORDS, (groups, packed_rows))
    order = parts.groups("g_idx", columns, groups) if "g_idx" in parts else groups_in_order(columns, size)
    if offset and not zeros.is_meta:
        # In the first version of the format, GPTQModel subtracts 1 from all zero points of a word
        # at once: a zero point of 0 borrows from the next
        ones = sum(1 << shift for shift in range(0, 32, bits))
        zeros = (zeros.long() + offset * ones).to(torch.int32)
    numbers = StoredNumbers((rows, columns), torch.uint8, lambda where: unpack(packed[:, where].t(), bits))
    return QuantizedMatrix(numbers, _by_row(scales), _by_row(unpack(zeros, bits)), order if groups > 1 else None, bits)


def _words_of_outputs(parts: MatrixParts, rows: int, bits: int) -> int:
    """Return the number of int32 words that hold one number of each row, without remainder."""
    packed = numbers_in(1, bits)
    if rows % packed:
        raise parts.error("qweight", f"has {rows} outputs; the number must be a multiple of {packed}")
    return rows // packed


class AwqFormat(CheckpointFormat):
    """AWQ of the version gemm: numbers are packed along the outputs, in a special order."""

    parts = frozenset(("qweight", "qzeros", "scales"))

    def __init__(self, settings: Json) -> None:
        version = str(settings.get("version") or settings.get("format") or "gemm").lower()
        if version != "gemm":
            raise unreadable(f"awq of the version {version!r}")
        if not settings.get("zero_point", True):
            raise unreadable("awq without zero points")
        self._plain = read_strings(settings, "modules_to_not_convert")
        _require_bits(settings, "w_bit" if "w_bit" in settings else "bits", (_AWQ_BITS,))
        self._group_size = _group_size(settings, "q_group_size" if "q_group_size" in settings else "group_size")

    def layout(self, module: str, parts: Collection[str]) -> MatrixLayout | None:
        if not self.parts & set(parts):
            return None
        required = ("qweight", "qzeros", "scales")
        bits = bits_as_stored(_AWQ_BITS, self._group_size)
        return MatrixLayout(
            "qweight", required, numbers_in(1, _AWQ_BITS), self._read, bits, group_size=self._group_size
        )

    def parts_of(self, module: str) -> Collection[str]:
        return () if any(name in module for name in self._plain) else self.parts

    def _read(self, parts: MatrixParts) -> QuantizedMatrix:
        packed = parts.read("qweight", WORDS, (None, None))
        columns, rows = packed.shape[0], numbers_in(packed.shape[1], _AWQ_BITS)
        size = self._group_size or columns
        groups = count_groups(columns, size)
        scales = parts.read("scales", SCALES, (groups, rows))
        zeros = parts.read("qzeros", WORDS, (groups, packed.shape[1]))
        return QuantizedMatrix(
            StoredNumbers((rows, columns), torch.uint8, partial(_unpack_awq_rows, packed)),
            _by_row(scales),
            _unpack_awq(zeros).float(),
            groups_in_order(columns, size),
            _AWQ_BITS,
        )


def _unpack_awq_rows(packed: Tensor, where: slice) -> Tensor:
    """Unpack some of the rows n of words [a, n / 8]."""
    per_word = len(_AWQ_ORDER)
    first, end = where.start // per_word, -(-where.stop // per_word)
    skipped = where.start - first * per_word
    return _unpack_awq(packed[:, first:end])[skipped : skipped + where.stop - where.start]


def _unpack_awq(packed: Tensor) -> Tensor:
    """Unpack the numbers of words [a, n / 8] to uint8 [n, a]."""
    if packed.is_meta:
        return packed.new_empty((packed.shape[1] * len(_AWQ_ORDER), packed.shape[0]), dtype=torch.uint8)
    by_word = unpack(packed.t(), _AWQ_BITS).reshape(packed.shape[1], packed.shape[0], len(_AWQ_ORDER))
    return by_word.transpose(1, 2)[:, _AWQ_ORDER].flatten(0, 1)


class Fp8Format(CheckpointFormat):
    """Float8 with a scale for each block (as in DeepSeek's checkpoints) or for each matrix."""

    parts = frozenset(("weight_scale_inv", "weight_scale", "input_scale", "activation_scale", "k_scale", "v_scale"))

    def __init__(self, settings: Json) -> None:
        block = settings.get("weight_block_size")
        self._block = None if block is None else block_shape(block)
        self._plain = (*read_strings(settings, "modules_to_not_convert"), *read_strings(settings, "ignored_layers"))
        self._float8_inputs = settings.get("activation_scheme") in ("dynamic", "static")

    def layout(self, module: str, parts: Collection[str]) -> MatrixLayout | None:
        scale = next((part for part in ("weight_scale_inv", "weight_scale") if part in parts), None)
        if scale is None:
            return None
        return MatrixLayout(
            "weight",
            ("weight",),
            1,
            partial(read_scaled, dtypes=FLOAT8, scale=scale, block=self._block),
            float8=True,
            float8_inputs=self._float8_inputs,
            group_size=self._block and self._block[1],
        )

    def parts_of(self, module: str) -> Collection[str]:
        return () if any(name in module for name in self._plain) else ("weight", "weight_scale")


def read_scaled(
    parts: MatrixParts, dtypes: Collection[torch.dtype], scale: str, block: tuple[int, int] | None
) -> QuantizedMatrix:
    """Read the matrix `weight`, with a scale for each block or for the whole matrix."""
    values = parts.read("weight", dtypes, (None, None))
    rows, columns = values.shape
    if block is None:
        scales = parts.read(scale, SCALES, (), (1,), (1, 1)).float().reshape(1, 1).expand(rows, 1)
        return QuantizedMatrix(StoredNumbers.plain(values), scales)
    height, width = block
    scales = parts.read(scale, SCALES, (count_groups(rows, height), count_groups(columns, width))).float()
    by_row = scales.repeat_interleave(height, dim=0)[:rows]
    return QuantizedMatrix(StoredNumbers.plain(values), by_row, groups=groups_in_order(columns, width))


def unreadable(what: str) -> ModelLoadError:
    """Return the error for a checkpoint with an unsupported quantization_config."""
    return ModelLoadError(
        f"config.json says that the model is quantized by {what}, which cannot be read; {PLAIN_VERSION}, or one by"
        f" {_READ}"
    )


def malformed(key: str, value: Any, wanted: str) -> ModelLoadError:
    """Return the error for an invalid value in a quantization_config."""
    return ModelLoadError(f"config.json has {key} {value!r} in its quantization_config; it must be {wanted}")


def read_object(settings: Json, key: str) -> Json:
    """Return the JSON object of a key, empty if it is absent or null. Raises ModelLoadError."""
    return _object(settings.get(key), key)


def _object(value: Any, key: str) -> Json:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise malformed(key, value, "a JSON object")
    return value


def read_strings(settings: Json, key: str) -> tuple[str, ...]:
    """Return the strings of a key, none if it is absent or null. Raises ModelLoadError."""
    value = settings.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise malformed(key, value, "a list of strings")
    return tuple(value)


def matches(pattern: str, module: str) -> bool:
    """Return whether a regular expression matches the beginning of a module's name."""
    try:
        return re.match(pattern, module) is not None
    except re.error as error:
        raise malformed("the pattern", pattern, f"a regular expression ({error})") from error


def block_shape(block: Any) -> tuple[int, int]:
    """Return the rows and columns of a block."""
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(size, int) and size > 0 for size in block):
        raise malformed("the block shape", block, "two positive integers")
    return block[0], block[1]


def _by_row(by_group: Tensor) -> Tensor:
    return by_group.float().t()


def _require_bits(settings: Json, key: str, supported: tuple[int, ...]) -> int:
    bits = settings.get(key)
    if bits not in supported:
        raise unreadable(f"{settings.get('quant_method')} with {key} {bits!r}")
    return int(bits)


def _group_size(settings: Json, key: str) -> int | None:
    """Return the number of columns that share a scale; None for a whole row."""
    size = -1 if settings.get(key) is None else settings[key]
    if not isinstance(size, int) or not (size == -1 or size > 0):
        raise malformed(key, size, "a positive integer, or -1 for whole rows")
    return None if size == -1 else size
