"""A digest of a model's configuration and weights, whatever folder they are in."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import IO

from workers.engine.checkpoint.tensor_files import weight_files

_SETTINGS = ("config.json", "generation_config.json")
_SAMPLED_BYTES = 256


def digest_of(folder: Path, dummy: bool = False) -> str:
    """Return a digest of a model's configuration and its tensors.

    It covers the tensors' names, types and shapes, and some bytes from the middle of each, since
    reading all bytes would take too long. Those of a `dummy` follow from its configuration.
    """
    digest = hashlib.sha256()
    for file in (folder / name for name in _SETTINGS):
        digest.update(file.read_bytes() if file.is_file() else b"")
    digest.update(b"dummy" if dummy else b"")
    for file in [] if dummy else weight_files(folder):
        with file.open("rb") as stream:
            for piece in _pieces(stream):
                digest.update(piece)
    return digest.hexdigest()


def _pieces(stream: IO[bytes]) -> list[bytes]:
    """Return the header of a safetensors file, and some bytes of each tensor."""
    length = int.from_bytes(stream.read(8), "little")
    header = stream.read(length)
    tensors = json.loads(header)
    tensors.pop("__metadata__", None)
    found = [header]
    for begin, end in sorted(tensor["data_offsets"] for tensor in tensors.values()):
        stream.seek(8 + length + begin + max(0, end - begin - _SAMPLED_BYTES) // 2)
        found.append(stream.read(min(_SAMPLED_BYTES, end - begin)))
    return found
