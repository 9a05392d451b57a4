"""Load the native library into this process.

The library has threads of its own (`source/parallel.h`): as many as torch has, and they sleep while
torch's threads compute.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import platform
from pathlib import Path

from workers.engine.native.build import NativeUnavailable
from workers.engine.native.choose import PREBUILT, native_library

logger = logging.getLogger(__name__)


@functools.cache
def load() -> ctypes.CDLL:
    """Return the library. Raises NativeUnavailable; a failure is not cached."""
    if platform.system() not in ("Linux", "Darwin"):
        raise NativeUnavailable("the native library is for Linux and macOS only")
    return _load(PREBUILT)


def _load(prebuilt: Path | None) -> ctypes.CDLL:
    with native_library(prebuilt) as path:
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            if path.parent != prebuilt:
                raise NativeUnavailable(f"{path} cannot be loaded: {error}") from error
            logger.warning("cannot use the CPU kernels of the package: %s; using cached ones, or compiling them", error)
            return _load(None)
    logger.debug("loaded the CPU kernels %s", path)
    return library
