"""A checkpoint's tensors by name, read once each while a model is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from workers.engine.errors import ModelLoadError
from workers.engine.layers.ops import Ops, TorchOps


class Weights:
    """Hands a model its tensors in the dtype and on the device that it runs with, and knows which were never asked for.

    `readers` maps a tensor's name to a function that reads it. Names may lack `prefix`: checkpoints saved from a bare decoder do. `ops` is
    what the layers compute with.
    """

    def __init__(
        self,
        readers: Mapping[str, Callable[[], Tensor]],
        dtype: torch.dtype,
        device: torch.device,
        prefix: str = "",
        ops: Ops | None = None,
    ) -> None:
        self._readers = dict(readers)
        self.dtype = dtype
        self.device = device
        self.ops = ops or TorchOps()
        self._prefix = prefix if any(name.startswith(prefix) for name in readers) else ""
        self._taken: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return self._resolve(name) in self._readers

    def take(self, name: str, shape: Sequence[int], transpose: bool = False) -> Tensor:
        """The tensor `name`, contiguous and owned by the caller; `shape` is the shape in the checkpoint, before `transpose`.

        Raises ModelLoadError where it is absent or has another shape.
        """
        size = (shape[1], shape[0]) if transpose else tuple(shape)
        target = torch.empty(size, dtype=self.dtype, device=self.device)
        self._read(name, shape, target.t() if transpose else target)
        return target

    def take_rows(self, names: Sequence[str], rows: Sequence[int], columns: int | None) -> Tensor:
        """Several tensors of [rows, columns] (or [rows] where `columns` is None) stacked into one, for projections that run as one."""
        rest = () if columns is None else (columns,)
        target = torch.empty((sum(rows), *rest), dtype=self.dtype, device=self.device)
        for name, part in zip(names, torch.split(target, list(rows)), strict=True):
            self._read(name, part.shape, part)
        return target

    def _read(self, name: str, shape: Sequence[int], target: Tensor) -> None:
        """Copies a tensor: a file that is replaced under a memory map would kill the process."""
        resolved = self._resolve(name)
        if resolved not in self._readers:
            raise ModelLoadError(f"the checkpoint has no tensor {resolved!r}; is it whole, and of the architecture in config.json?")
        tensor = self._readers[resolved]()
        if tuple(tensor.shape) != tuple(shape):
            raise ModelLoadError(f"tensor {resolved!r} has shape {list(tensor.shape)}, but config.json implies {list(shape)}")
        self._taken.add(resolved)
        target.copy_(tensor)

    def unused(self) -> list[str]:
        """Names that no layer took."""
        return sorted(self._readers.keys() - self._taken)

    def _resolve(self, name: str) -> str:
        if name in self._readers or not name.startswith("*."):
            return name
        return self._prefix + name[2:]
