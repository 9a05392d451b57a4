"""Notes on files, stored beside them."""

import contextlib
from pathlib import Path
from typing import TypeVar, cast

import msgspec

from jobs.store.storage import StoreError, read_bytes, write_bytes

Note = TypeVar("Note", bound=msgspec.Struct)


def read_note(path: Path, decoder: msgspec.json.Decoder[Note]) -> Note | None:
    """Return the decoder's note on a file, or None if it is missing or unreadable."""
    kind = cast("type[Note]", decoder.type)
    with contextlib.suppress(StoreError, msgspec.DecodeError):
        return decoder.decode(read_bytes(str(note_path(path, kind))))
    return None


def write_note(path: Path, note: msgspec.Struct) -> None:
    """Store a note on a file. Raise `StoreError`."""
    write_bytes(str(note_path(path, type(note))), msgspec.json.encode(note))


def note_path(path: Path, kind: type[msgspec.Struct]) -> Path:
    """Return the path of the note of a kind on a file."""
    return path.with_name(f".{path.name}.{kind.__name__.lower()}")
