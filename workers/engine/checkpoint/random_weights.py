"""Random weights in the place of a checkpoint's tensors (`--load-format dummy`)."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from workers.engine.checkpoint.quantized_formats import CheckpointFormat
from workers.engine.checkpoint.quantized_matrix import MatrixLayout, Reader
from workers.engine.layers.base import Ops
from workers.engine.layers.parallel import Parallel, Shard
from workers.engine.layers.quantized import QuantizedRows, QuantizedWeight
from workers.engine.layers.stored_matrix import StoredMatrix
from workers.engine.layers.weights import Weights

_SEED = 0
_WINDOWS = 1 << 20  # where the rows of a matrix begin
_LARGEST = {torch.uint8: 7, torch.int8: 127, torch.float8_e4m3fn: 1}
_TABLE_SCALE = 0.25
_MIDDLE = 8  # of numbers of 4 bits


class RandomWeights(Weights):
    """Provides every tensor that a model asks for, the same numbers in each process.

    Matrices are uniform with the variance 1 / n for their shorter side n, so that hidden states
    keep about their size; biases are 0, other tensors of one dimension 1, since most multiply. A
    matrix that `quantized` stores in few bits is so here, if products with it need no
    dequantization. Others are exact in `stored`.
    """

    def __init__(
        self,
        quantized: CheckpointFormat | None,
        stored: torch.dtype,
        dtype: torch.dtype,
        device: torch.device,
        prefix: str,
        ops: Ops | None,
        parallel: Parallel | None,
    ) -> None:
        super().__init__({}, dtype, device, "", ops, parallel)
        self._prefix, self._format, self._stored_dtype = prefix, quantized, stored
        self._pools: dict[tuple[int, torch.dtype, float], Tensor] = {}

    def beside(self, readers: Callable[[], Mapping[str, Reader]]) -> Weights:
        return RandomWeights(None, torch.float32, torch.float32, self.device, "", None, None)

    def take(self, name: str, shape: Sequence[int]) -> Tensor:
        stored = self._open(name, shape) if len(shape) == 1 else self._table(name, *shape)
        return self._allocate(shape).copy_(stored)

    def take_table(self, name: str, rows: int, columns: int, part: Shard | None = None) -> StoredMatrix:
        table = self._table(name, rows, columns)
        return self._plain([table if part is None else table[part.where]])

    def _table(self, name: str, rows: int, columns: int) -> Tensor:
        """Return a matrix of smaller numbers.

        With others, a tied output projection repeats the last token: its embedding is in the hidden
        state.
        """
        return self._windows(name, (rows, columns), self._stored_dtype, _TABLE_SCALE * _largest(rows, columns))

    def _open(self, name: str, shape: Sequence[int]) -> Tensor:
        if len(shape) == 1:
            value = 0.0 if name.endswith("bias") else 1.0
            return torch.full(tuple(shape), value, dtype=self._stored_dtype, device=self.device)
        rows, columns = shape
        return self._windows(name, (rows, columns), self._stored_dtype, _largest(rows, columns))

    def _quantized(self, name: str, shape: Sequence[int]) -> QuantizedRows | None:
        module = self._resolve(name).removesuffix(".weight")
        parts = () if self._format is None else self._format.parts_of(module)
        layout = self._format.layout(module, parts) if self._format is not None and parts else None
        stored = None if layout is None else self._kind(layout)
        if layout is None or stored is None:
            return None
        rows, columns = shape
        numbers = self._windows(name, (rows, columns), stored, _LARGEST[stored])
        size = min(layout.group_size or columns, columns)
        groups = -(-columns // size)
        scale = _largest(rows, columns) / _LARGEST[stored]
        form = QuantizedWeight(
            torch.empty((), dtype=stored, device=self.device).expand(rows, columns),
            torch.full((rows, groups), scale, device=self.device),
            self.dtype,
            size,
            torch.full((rows, groups), _MIDDLE, dtype=torch.uint8, device=self.device)
            if stored == torch.uint8
            else None,
            layout.float8_inputs and stored == torch.float8_e4m3fn,
        )
        return QuantizedRows(form, lambda where: numbers[where].clone(memory_format=torch.contiguous_format))

    def _windows(self, name: str, shape: tuple[int, int], dtype: torch.dtype, largest: float) -> Tensor:
        """Return a matrix whose rows are windows of one pool of numbers, which take no memory.

        The name decides where they begin.
        """
        rows, columns = shape
        stride = max(1, _WINDOWS // rows) | 1
        begin = zlib.crc32(name.encode()) % _WINDOWS
        length = -(-(begin + rows * stride + columns) // _WINDOWS) * _WINDOWS
        key = (length, dtype, largest)
        if key not in self._pools:
            self._pools[key] = _new_pool(*key, self.device)
        return self._pools[key].as_strided(shape, (stride, 1), begin)

    def _kind(self, layout: MatrixLayout) -> torch.dtype | None:
        """Return the dtype of a matrix's numbers; None to store it as a plain one."""
        if layout.bits is not None and self.ops.multiplies(layout.bits, self.dtype):
            return torch.uint8 if layout.bits == 4 else torch.int8
        return torch.float8_e4m3fn if layout.float8 and self.ops.multiplies_float8(self.device) else None


def _largest(rows: int, columns: int) -> float:
    return math.sqrt(3 / min(rows, columns))


def _new_pool(length: int, dtype: torch.dtype, largest: float, device: torch.device) -> Tensor:
    """Return uniform numbers up to `largest` in magnitude; those of 4 bits are around 8."""
    if device.type == "meta":
        return torch.empty(length, dtype=dtype, device=device)
    numbers = torch.empty(length).uniform_(-largest, largest, generator=torch.Generator().manual_seed(_SEED))
    if dtype in (torch.uint8, torch.int8):
        numbers.round_()
    return (numbers + _MIDDLE if dtype == torch.uint8 else numbers).to(dtype).to(device)
