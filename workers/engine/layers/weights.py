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
from workers.engine.layers.quantized import QuantizedWeight, Weight, stack_rows
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

    def quantized(self) -> QuantizedWeight | None:
        """Return it as stored, or None without `bits` or if its numbers are not of that kind."""

    def float8(self) -> QuantizedWeight | None:
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

    def __contains__(self, name: str) -> bool:
        return self._resolve(name) in self._readers

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        """Return the whole tensor `name`, contiguous and owned by the caller.

        Raises ModelLoadError if it is absent or has another shape.
        """
        target = torch.empty(tuple(shape), dtype=self.dtype, device=self.device)
        self._read(name, shape, (), target)
        return target

    def take_rows(
        self, names: Sequence[str], rows: Sequence[Rows], columns: int | None, transposed: bool = False
    ) -> Tensor:
        """Return rows of several tensors [total, columns] (or [total] if `columns` is None),
        stacked for a fused projection.

        With `transposed`, the checkpoint stores them as [columns, total].
        """
        rest = () if columns is None else (columns,)
        target = torch.empty((sum(part.length for part in rows), *rest), dtype=self.dtype, device=self.device)
        for name, shard, part in zip(names, rows, torch.split(target, [shard.length for shard in rows]), strict=True):
            if transposed and columns is not None:
                self._read(name, (columns, shard.total), (slice(None), shard.where), part.t())
            else:
                self._read(name, (shard.total, *rest), (shard.where,), part)
        return target

    def take_matrix(self, names: Sequence[str], rows: Sequence[Rows], columns: int, transposed: bool = False) -> Weight:
        """Return `take_rows` of a matrix, quantized if it is stored so and products with it need no
        dequantization.
        """
        found = {
            name: self._read_quantized(name, (shard.total, columns)) for name, shard in zip(names, rows, strict=True)
        }
        pairs = [(found[name], shard) for name, shard in zip(names, rows, strict=True)]
        parts = [weight.rows(shard.where) for weight, shard in pairs if weight is not None]
        whole = stack_rows(parts) if len(parts) == len(names) else None
        if whole is None:
            del found, pairs, parts
            return self.take_rows(names, rows, columns, transposed)
        self._taken.update(map(self._resolve, names))
        return whole.to(self.device)

    def take_matrix_columns(self, name: str, rows: int, columns: Shard, transposed: bool = False) -> Weight:
        """Return `take_columns` of a matrix, quantized like `take_matrix`."""
        weight = self._read_quantized(name, (rows, columns.total))
        if weight is not None:
            weight = weight.columns(columns.start, columns.start + columns.length)
            if weight.has_whole_groups:
                self._taken.add(self._resolve(name))
                return weight.to(self.device)
        return self.take_columns(name, rows, columns, transposed)

    def _read_quantized(self, name: str, shape: Sequence[int]) -> QuantizedWeight | None:
        """Return the whole matrix in host memory, since only a rank's part goes to the device."""
        resolved = self._resolve(name)
        reader = self._readers.get(resolved)
        if not isinstance(reader, QuantizedReader):
            return None
        weight = reader.quantized() if self.ops.multiplies(reader.bits, self.dtype) else None
        if weight is None and self.ops.multiplies_float8(self.device):
            weight = reader.float8()
        if weight is None:
            return None
        _check_shape(resolved, weight.shape, shape)
        return replace(weight, dtype=self.dtype)

    def take_columns(self, name: str, rows: int, columns: Shard, transposed: bool = False) -> Tensor:
        """Return columns of a tensor [rows, total], which the checkpoint stores as [total, rows] if
        `transposed`.
        """
        target = torch.empty((rows, columns.length), dtype=self.dtype, device=self.device)
        if transposed:
            self._read(name, (columns.total, rows), (columns.where,), target.t())
        else:
            self._read(name, (rows, columns.total), (slice(None), columns.where), target)
        return target

    def _read(self, name: str, shape: Sequence[int], where: tuple[slice | Tensor, ...], target: Tensor) -> None:
        """Copy a tensor or a part of it, since a file replaced under a memory map would kill the
        process.
        """
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
        target.copy_(tensor[where])

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
