"""Provide a checkpoint's tensors by name; each is read once while a model is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from workers.engine.layers.base import Ops
from workers.engine.layers.heads import Rows
from workers.engine.layers.ops import TorchOps
from workers.engine.layers.parallel import Parallel, Shard
from workers.engine.layers.quantized import QuantizedRows, QuantizedWeight, Weight
from workers.engine.layers.stored_matrix import StoredMatrix, parts_within, stack_stored
from workers.engine.messages.errors import ModelLoadError

PLAIN_VERSION = "use the model's float16, bfloat16 or float32 version"
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@runtime_checkable
class QuantizedReader(Protocol):
    """A function that reads a quantized matrix of the checkpoint."""

    @property
    def bits(self) -> int | None:
        """Return the bits of its numbers, or None if it has no such kind of weights."""

    def __call__(self) -> Tensor: ...

    def quantized(self) -> QuantizedRows | None:
        """Return it as stored, or None without `bits` or if its numbers are not of that kind."""

    def float8(self) -> QuantizedRows | None:
        """Return it as stored if that is float8, with scales for groups of consecutive columns;
        else None.
        """


class Weights:
    """Provide a model's tensors in its dtype and on its device, and track unused ones.

    `readers` maps a tensor's name to a function that reads it. Names may lack `prefix`, as in
    checkpoints saved from a bare decoder. `ops` are the operations of the layers, `parallel`
    selects the parts to read.
    """

    def __init__(
        self,
        readers: Mapping[str, Callable[[], Tensor]],
        dtype: torch.dtype,
        device: torch.device,
        prefix: str = "",
        ops: Ops | None = None,
        parallel: Parallel | None = None,
    ) -> None:
        self._readers = dict(readers)
        self.dtype = dtype
        self.device = device
        self.ops = ops or TorchOps()
        self.parallel = parallel or Parallel()
        self._prefix = prefix if any(name.startswith(prefix) for name in readers) else ""
        self._taken: set[str] = set()
        self.allocated = 0  # bytes of the tensors that are not matrices of layers

    def __contains__(self, name: str) -> bool:
        return self._resolve(name) in self._readers

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        """Return the whole tensor `name`, contiguous and owned by the caller.

        Raises ModelLoadError if it is absent or has another shape.
        """
        return self._allocate(shape).copy_(self._open(name, shape))

    def take_rows(self, names: Sequence[str], rows: Sequence[Rows]) -> Tensor:
        """Return numbers of several tensors with one dimension, one after the other."""
        target = self._allocate((sum(part.length for part in rows),))
        for name, shard, part in zip(names, rows, torch.split(target, [shard.length for shard in rows]), strict=True):
            part.copy_(self._open(name, (shard.total,))[shard.where])
        return target

    def take_table(self, name: str, rows: int, columns: int, part: Shard | None = None) -> StoredMatrix:
        """Return a plain matrix [rows, columns], or a part of its rows."""
        table = self._open(name, (rows, columns))
        return self._plain([table if part is None else table[part.where]])

    def take_matrix(
        self, names: Sequence[str], rows: Sequence[Rows], columns: int, transposed: bool = False
    ) -> StoredMatrix:
        """Return rows of several matrices [total, columns], stacked for a fused projection.

        It is quantized if they are stored so and products with it need no dequantization. With
        `transposed`, the checkpoint stores them as [columns, total].
        """
        found = [self._quantized(name, (shard.total, columns)) for name, shard in zip(names, rows, strict=True)]
        parts = [
            self._stored(part, shard, Shard(0, columns, columns))
            for part, shard in zip(found, rows, strict=True)
            if part is not None
        ]
        stacked = stack_stored(parts) if len(parts) == len(names) else None
        if stacked is not None:
            self._taken.update(map(self._resolve, names))
            return stacked
        del found, parts
        return self._plain(
            [
                self._open(name, (columns, shard.total))[:, shard.where].t()
                if transposed
                else self._open(name, (shard.total, columns))[shard.where]
                for name, shard in zip(names, rows, strict=True)
            ]
        )

    def take_matrix_columns(self, name: str, rows: int, columns: Shard, transposed: bool = False) -> StoredMatrix:
        """Return columns of a matrix [rows, total], quantized like `take_matrix`."""
        found = self._quantized(name, (rows, columns.total))
        if found is not None:
            stored = self._stored(found, Shard(0, rows, rows), columns)
            if isinstance(stored.form, QuantizedWeight) and stored.form.has_whole_groups:
                self._taken.add(self._resolve(name))
                return stored
        if transposed:
            return self._plain([self._open(name, (columns.total, rows))[columns.where].t()])
        return self._plain([self._open(name, (rows, columns.total))[:, columns.where]])

    def _plain(self, parts: Sequence[Tensor]) -> StoredMatrix:
        """Return the rows of tensors of the checkpoint [n, k] as one matrix."""
        columns, lengths = parts[0].shape[1], [len(part) for part in parts]

        def read(where: slice) -> Tensor:
            target = torch.empty((where.stop - where.start, columns), dtype=self.dtype, device=self.device)
            found = list(parts_within(where, lengths))
            for (index, within), rows in zip(
                found, torch.split(target, [within.stop - within.start for _, within in found]), strict=True
            ):
                rows.copy_(parts[index][within])
            return target

        form = torch.empty((), dtype=self.dtype).expand(sum(lengths), columns)
        dtypes = {part.dtype for part in parts}
        exact = next(iter(dtypes)) if len(dtypes) == 1 else None
        return StoredMatrix(form, read, exact if exact in (torch.bfloat16, torch.float16) else None)

    def _stored(self, matrix: QuantizedRows, rows: Rows, columns: Shard) -> StoredMatrix:
        """Return a part of a quantized matrix; only this part goes to the device."""
        first, end = columns.start, columns.start + columns.length

        def read(where: slice) -> Weight:
            part = matrix.rows(rows.select(where))
            return (part if columns.length == columns.total else part.columns(first, end)).to(self.device)

        form = matrix.form_of_rows(rows.where)
        return StoredMatrix(form if columns.length == columns.total else form.columns(first, end), read)

    def _quantized(self, name: str, shape: Sequence[int]) -> QuantizedRows | None:
        """Return the whole matrix in host memory, as it is stored."""
        resolved = self._resolve(name)
        reader = self._readers.get(resolved)
        if not isinstance(reader, QuantizedReader):
            return None
        matrix = reader.quantized() if self.ops.multiplies(reader.bits, self.dtype) else None
        if matrix is None and self.ops.multiplies_float8(self.device):
            matrix = reader.float8()
        if matrix is None:
            return None
        _check_shape(resolved, matrix.form.shape, shape)
        return replace(matrix, form=replace(matrix.form, dtype=self.dtype))

    def _allocate(self, shape: Sequence[int]) -> Tensor:
        """Return memory for a copy, since a file replaced under a memory map would kill the
        process.
        """
        target = torch.empty(tuple(shape), dtype=self.dtype, device=self.device)
        self.allocated += target.nbytes
        return target

    def _open(self, name: str, shape: Sequence[int]) -> Tensor:
        """Return a tensor of the checkpoint, in a memory map of its file."""
        resolved = self._resolve(name)
        if resolved not in self._readers:
            raise ModelLoadError(
                f"the checkpoint has no tensor {resolved!r}; check that it is complete and matches config.json"
            )
        tensor = self._readers[resolved]()
        _check_shape(resolved, tensor.shape, shape)
        if tensor.dtype not in _FLOATS:
            raise ModelLoadError(
                f"tensor {resolved!r} holds {str(tensor.dtype).removeprefix('torch.')}, and how it is scaled is not"
                f" known; {PLAIN_VERSION}"
            )
        self._taken.add(resolved)
        return tensor

    def beside(self, readers: Callable[[], Mapping[str, Callable[[], Tensor]]]) -> Weights:
        """Return the tensors of a module beside the model, in float32."""
        return Weights(readers(), torch.float32, self.device)

    def unused(self) -> list[str]:
        """Return the names of tensors that no layer used."""
        return sorted(self._readers.keys() - self._taken)

    def _resolve(self, name: str) -> str:
        if name in self._readers or not name.startswith("*."):
            return name
        return self._prefix + name[2:]


def _check_shape(name: str, found: Sequence[int], expected: Sequence[int]) -> None:
    if tuple(found) != tuple(expected):
        raise ModelLoadError(f"tensor {name!r} has shape {list(found)}, but config.json implies {list(expected)}")
