"""The backends by name, and the default backend of a device."""

from __future__ import annotations

import logging

import torch

from workers.engine.backends.base import Backend
from workers.engine.backends.cpu import CpuBackend
from workers.engine.backends.torch import TorchBackend
from workers.engine.backends.triton import TritonBackend
from workers.engine.messages.errors import ModelLoadError

logger = logging.getLogger(__name__)

_TORCH, _CPU, _TRITON = TorchBackend(), CpuBackend(), TritonBackend()
_BY_NAME: dict[str, Backend] = {backend.name: backend for backend in (_TORCH, _CPU, _TRITON)}
_BY_DEVICE: dict[str, Backend] = {"cpu": _CPU, "cuda": _TRITON}


def find_backend(name: str) -> Backend:
    """Return the backend of that name. Raise ModelLoadError if there is none."""
    if name not in _BY_NAME:
        *others, last = _BY_NAME
        raise ModelLoadError(f"unknown attention backend {name!r}; choose auto, {', '.join(others)} or {last}")
    return _BY_NAME[name]


def default_backend(device: torch.device, dtype: torch.dtype) -> Backend:
    """Return the backend with kernels for the device; if they cannot run, log why and return plain
    torch.
    """
    preferred = _BY_DEVICE[device.type]
    why = preferred.unfit(device, dtype)
    if why is None:
        return preferred
    logger.warning("%s; plain torch is used, which is slower", why)
    return _TORCH
