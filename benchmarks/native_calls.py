"""Marking of calls of the engine's C kernels, so that torch's profiler shows them by name."""

from contextlib import suppress
from typing import Any

import torch

from workers.engine.native.library import NativeUnavailable, load

PREFIX = "native::"


def name_native_calls() -> None:
    """Mark the calls of C kernels, if there are any.

    Call this before an engine is created in this process.
    """
    with suppress(NativeUnavailable):
        library = load()
        plain: Any = library._FuncPtr

        class Recorded(plain):  # type: ignore[misc]
            _flags_, _restype_ = plain._flags_, plain._restype_

            def __call__(self, *values: Any) -> Any:
                with torch.profiler.record_function(PREFIX + self.__name__):
                    return super().__call__(*values)

        library._FuncPtr = Recorded
