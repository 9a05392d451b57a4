"""A checkpoint's tensors by name, read once each while a model is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from workers.engine.errors import ModelLoadError


class Weights:
    """Hands a model its tensors in the dtype and on the device that it runs with, and knows which were never asked for.

    `readers` maps a tensor's name to a function that reads it. Names may lack `prefix`: checkpoints saved from a bare decoder do.
    """

    def __init__(self, readers: Mapping[str, Callable[[], Tensor]], dtype: torch.dtype, device: torch.device, prefix: str = "") -> None:
        self._readers = dict(readers)
        self._dtype = dtype
        self._device = device
        self._prefix = prefix if any(name.startswith(prefix) for name in readers) else ""
        self._taken: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return self._resolve(name) in self._readers

    def take(self, name: str, shape: Sequence[int], transpose: bool = False) -> Tensor:
        """The tensor `name`, contiguous and owned by the caller; `shape` is the shape in the checkpoint, before `transpose`.

        Raises ModelLoadError where it is absent or has another shape.
        """
        resolved = self._resolve(name)
        if resolved not in self._readers:
            raise ModelLoadError(f"the checkpoint has no tensor {resolved!r}; is it whole, and of the architecture in config.json?")
        tensor = self._readers[resolved]()
        if tuple(tensor.shape) != tuple(shape):
            raise ModelLoadError(f"tensor {resolved!r} has shape {list(tensor.shape)}, but config.json implies {list(shape)}")
        self._taken.add(resolved)
        if transpose:
            tensor = tensor.t()
        # A copy of its own: a file that is replaced under a memory map would kill the process.
        return tensor.to(device=self._device, dtype=self._dtype, copy=True).contiguous()

    def take_rows(self, names: Sequence[str], rows: Sequence[int], columns: int | None) -> Tensor:
        """Several tensors of [rows, columns] (or [rows] where `columns` is None) stacked into one, for projections that run as one."""
        shapes = [(count,) if columns is None else (count, columns) for count in rows]
        return torch.cat([self.take(name, shape) for name, shape in zip(names, shapes, strict=True)])

    def unused(self) -> list[str]:
        """Names that no layer took."""
        return sorted(self._readers.keys() - self._taken)

    def _resolve(self, name: str) -> str:
        if name in self._readers or not name.startswith("*."):
            return name
        return self._prefix + name[2:]
