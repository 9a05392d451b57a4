"""A wall clock of its own for the processes of one "machine", which can be set forward and back
while they run.
"""

import functools
import struct
import subprocess
import tempfile
from pathlib import Path

_SOURCE = Path(__file__).with_name("clock_shim.c")
_LIBRARY = "clock_shim.so"


class Clock:
    """Processes that are started with `environment` see this clock: the true one moved by `offset`
    seconds.
    """

    def __init__(self, file: Path) -> None:
        """`file` holds the offset; its folder must exist."""
        self._file = file
        self.offset = 0.0
        file.write_bytes(struct.pack("q", 0))
        self.environment = {"LD_PRELOAD": f"{_library_folder().name}/{_LIBRARY}", "CLOCK_OFFSET_FILE": str(file)}

    def step(self, seconds: float) -> None:
        """Sets the clock forward, or back."""
        self.offset += seconds
        with self._file.open("r+b") as file:  # in place: it is mapped
            file.write(struct.pack("q", int(self.offset * 1e9)))


@functools.cache
def _library_folder() -> "tempfile.TemporaryDirectory[str]":
    """Holds the compiled library as long as this process lives."""
    folder = tempfile.TemporaryDirectory(prefix="clock-")
    subprocess.run(
        ["cc", "-O2", "-shared", "-fPIC", "-o", f"{folder.name}/{_LIBRARY}", str(_SOURCE), "-ldl"], check=True
    )
    return folder
