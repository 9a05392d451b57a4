"""A wall clock of its own for the processes of one "machine", which can be set forward and back
while they run.
"""

import struct
from pathlib import Path

from tests.support.shims import preloaded


class Clock:
    """Processes that are started with `environment` see this clock: the true one moved by `offset`
    seconds.
    """

    def __init__(self, file: Path) -> None:
        """`file` holds the offset; its folder must exist."""
        self._file = file
        self.offset = 0.0
        file.write_bytes(struct.pack("q", 0))
        self.environment = {"LD_PRELOAD": preloaded("clock_shim.c"), "CLOCK_OFFSET_FILE": str(file)}

    def step(self, seconds: float) -> None:
        """Sets the clock forward, or back."""
        self.offset += seconds
        with self._file.open("r+b") as file:  # in place: it is mapped
            file.write(struct.pack("q", int(self.offset * 1e9)))
