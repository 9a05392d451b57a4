"""Folders whose files take long to be opened and read, or cannot be until they are released, as on
a network file system that is overloaded or away.
"""

import mmap
import os
import struct
from pathlib import Path

from tests.support.shims import preloaded

_MOST = 64  # as in slow_folder_shim.c
_ENTRY = struct.Struct("qq240s")
_PAUSE = struct.Struct("q")
_BLOCKED = -1


class SlowFolders:
    """Processes that are started with `environment` see these folders so; no other does."""

    def __init__(self, file: Path) -> None:
        """`file` holds what is slow; its folder must exist."""
        file.write_bytes(bytes(_MOST * _ENTRY.size))
        with file.open("r+b") as opened:
            self._entries = mmap.mmap(opened.fileno(), 0)
        self._places: dict[Path, int] = {}
        self.environment = {"LD_PRELOAD": preloaded("slow_folder_shim.c"), "SLOW_FOLDERS_FILE": str(file)}

    def slow(self, folder: Path, seconds: float) -> None:
        """Let each call for a file below `folder`, or for the file `folder`, take so long."""
        self._set(folder, int(seconds * 1e9))

    def block(self, folder: Path) -> None:
        """Let each such call wait until `release`."""
        self._set(folder, _BLOCKED)

    def release(self, *folders: Path) -> None:
        """Let these, by default all, be as they were."""
        for folder in folders or list(self._places):
            if (place := self._places.pop(folder, None)) is not None:
                _PAUSE.pack_into(self._entries, place * _ENTRY.size, 0)

    def waiting(self, folder: Path) -> int:
        """Return how many calls wait now; those of killed processes count too."""
        _, waiting, _ = _ENTRY.unpack_from(self._entries, self._places[folder] * _ENTRY.size)
        return int(waiting)

    def _set(self, folder: Path, pause: int) -> None:
        place = self._places.get(folder)
        if place is None:
            place = self._places[folder] = min(set(range(_MOST)).difference(self._places.values()))
            _ENTRY.pack_into(self._entries, place * _ENTRY.size, 0, 0, os.fsencode(folder))
        _PAUSE.pack_into(self._entries, place * _ENTRY.size, pause)
