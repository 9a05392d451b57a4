"""The formats of a batch's input file, by the suffixes of their names in the store.

A format is recognized by a file's name and by its first bytes.
"""

import os

from jobs.protocol import fields
from jobs.protocol.lines import BOM, decode_json

JSONL, GZIP, ZSTD, PARQUET = ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet"
HEAD_BYTES = 1 << 18
"""How many of the first bytes of a content are inspected."""

_SUFFIXES = {JSONL: JSONL, GZIP: GZIP, ZSTD: ZSTD, PARQUET: PARQUET, ".pq": PARQUET}
_MAGIC = {b"\x1f\x8b": GZIP, b"\x28\xb5\x2f\xfd": ZSTD, b"PAR1": PARQUET}


def format_of_content(head: bytes) -> str:
    """Return the format of a content that begins with `head`; without a magic number it is
    JSONL.
    """
    return next((kept for magic, kept in _MAGIC.items() if head.startswith(magic)), JSONL)


def format_of_upload(filename: str, head: bytes) -> str | None:
    """Return the format of an uploaded file; None if its name has another format's suffix."""
    said, found = _format_of_name(filename), format_of_content(head)
    return found if said in ("", found) else None


def name_problem(filename: str) -> str | None:
    """Return why no batch can read a file of this name; a name without a suffix is accepted."""
    known = _format_of_name(filename) is not None
    return None if known else f"'{fields.shown(filename)}' has another suffix."


def content_problem(filename: str, head: bytes, size: int) -> str | None:
    """Return why no batch can read a file of `size` bytes that begins with `head`.

    Only the first line is checked.
    """
    kind = format_of_upload(filename, head)
    if kind is None:
        return f"'{fields.shown(filename)}' does not have the format of its suffix."
    if not size:
        return "The file is empty."
    return _line_problem(head, size == len(head)) if kind == JSONL else None


def _format_of_name(filename: str) -> str | None:
    """Return "" for a name without a suffix, None for one with another suffix."""
    name = filename.lower()
    said = next((kept for suffix, kept in _SUFFIXES.items() if name.endswith(suffix)), None)
    return said if said or os.path.splitext(name)[1] else ""


def _line_problem(head: bytes, whole: bool) -> str | None:
    """Return what is wrong with the first line that is not blank, if it ends within `head`."""
    line, ended, _ = head.removeprefix(BOM).lstrip().partition(b"\n")
    if not line or not (ended or whole):
        return None
    try:
        return None if isinstance(decode_json(line), dict) else "Its first line is not a JSON object."
    except ValueError as error:
        return f"Its first line is not valid JSON: {error}."
