"""The native library in this process.

Its threads are OpenMP's, of the one runtime that torch has loaded already.
"""

from __future__ import annotations

import ctypes
import functools
import platform

import torch  # noqa: F401  (its OpenMP runtime has to be there first: a second one would have threads of its own)

from workers.engine.native.build import NativeUnavailable, built_library


@functools.cache
def load() -> ctypes.CDLL:
    """Raise NativeUnavailable, at every call anew."""
    if platform.system() != "Linux":
        raise NativeUnavailable("it is for Linux")
    path = built_library()
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(f"{path} cannot be loaded: {error}") from error
