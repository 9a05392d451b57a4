"""Ids of files, uploads, batches and keys: a prefix and 24 hex digits.

The first 13 digits are microseconds since the epoch, so that ids sort by time.
"""

import re
import secrets

FILE = "file-"
UPLOAD = "upload_"
PART = "part_"  # of an upload
BATCH = "batch_"
KEY = "key_"

TIME_DIGITS = 13
_RANDOM_DIGITS = 11
_DIGITS = re.compile(rf"[0-9a-f]{{{TIME_DIGITS + _RANDOM_DIGITS}}}")


def new_id(prefix: str, now: float) -> str:
    """Return an unused id; `now` is unix seconds."""
    return f"{prefix}{int(now * 1e6):0{TIME_DIGITS}x}{secrets.randbits(4 * _RANDOM_DIGITS):0{_RANDOM_DIGITS}x}"


def is_id(prefix: str, text: str) -> bool:
    """Return whether the text is an id of that kind, which is safe in a path and in a key."""
    return text.startswith(prefix) and _DIGITS.fullmatch(text, len(prefix)) is not None


def time_of(text: str) -> float | None:
    """Return when an id was created, in unix seconds; None if the text is no id."""
    prefix = next((prefix for prefix in (FILE, UPLOAD, PART, BATCH, KEY) if is_id(prefix, text)), None)
    return None if prefix is None else micros_of(prefix, text) / 1e6


def micros_of(prefix: str, text: str) -> int:
    """Return when an id was created, in microseconds; the text must be an id."""
    return int(text[len(prefix) : len(prefix) + TIME_DIGITS], 16)
