"""Libraries in C that are preloaded into a process, so that it meets what a test cannot bring about
otherwise.
"""

import functools
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path


def preloaded(source: str) -> str:
    """Return the path of the library made of this file of the folder, for `LD_PRELOAD`."""
    return f"{_compiled(source).name}/{Path(source).stem}.so"


def joined(*environments: Mapping[str, str]) -> dict[str, str]:
    """Return what all of these environments set; the libraries of each are preloaded."""
    libraries = [environment["LD_PRELOAD"] for environment in environments if "LD_PRELOAD" in environment]
    merged = {name: value for environment in environments for name, value in environment.items()}
    return merged | ({"LD_PRELOAD": ":".join(libraries)} if libraries else {})


@functools.cache
def _compiled(source: str) -> "tempfile.TemporaryDirectory[str]":
    """Holds the compiled library as long as this process lives."""
    folder = tempfile.TemporaryDirectory(prefix="shim-")
    library = f"{folder.name}/{Path(source).stem}.so"
    subprocess.run(
        ["cc", "-O2", "-shared", "-fPIC", "-o", library, str(Path(__file__).with_name(source)), "-ldl"], check=True
    )
    return folder
