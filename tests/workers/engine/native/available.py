"""Whether this machine has the native library; where it has none, its tests are skipped and say
why.
"""

import pytest

from workers.engine.native.build import NativeUnavailable
from workers.engine.native.library import load


def missing_native() -> str:
    """Why there is none; empty where there is one."""
    try:
        load()
    except NativeUnavailable as reason:
        return str(reason)
    return ""


needs_native = pytest.mark.skipif(bool(missing_native()), reason=f"no native library: {missing_native()}")
