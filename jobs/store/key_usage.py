"""The usage of each API key, saved in a file of the file store.

If Redis has lower counts, since it lost data, they are raised to those of the file.
"""

import contextlib
from collections import Counter
from pathlib import PurePath
from typing import Any

import msgspec

from jobs.queue.request_queue import KeyUsage
from jobs.store.storage import (
    StoreError,
    exclusive,
    is_local,
    is_missing,
    read_version,
    write_version,
)

FILE = "key_usage.json"
_LOCK_SECONDS = 5.0
_decode = msgspec.json.Decoder(KeyUsage).decode


def load_usage(store: PurePath) -> KeyUsage:
    """Return the counts as last saved.

    Raise `StoreError`.
    """
    return _read(str(store / FILE))[0]


def save_usage(store: PurePath, usage: KeyUsage) -> KeyUsage:
    """Raise the counts in the file to these, durably, and return the file's counts.

    A deposed leader may write late, so counts never decrease. Raise `StoreError` and `Busy`.
    """
    location = str(store / FILE)
    with exclusive(str(store), _LOCK_SECONDS, f".{FILE}.lock") if is_local(location) else contextlib.nullcontext():
        written = None
        while written is None:  # while another leader writes to the bucket
            saved, version = _read(location)
            usage = larger(saved, usage)
            data = msgspec.json.format(msgspec.json.encode(usage), indent=1)
            written = write_version(location, data, version)
    return usage


def larger(one: KeyUsage, other: KeyUsage) -> KeyUsage:
    """Return the larger of each two counts, without counts of 0."""
    return {key_id: dict(Counter(one.get(key_id)) | Counter(other.get(key_id))) for key_id in one | other}


def behind(found: KeyUsage, saved: KeyUsage) -> KeyUsage:
    """Return the saved counts of the keys with lower counts in `found`."""
    return {key_id: counts for key_id, counts in saved.items() if Counter(counts) - Counter(found.get(key_id))}


def usage_object(counts: dict[str, int]) -> dict[str, Any]:
    """Return the counts of a key in the form of a batch's `usage`."""
    return {
        "input_tokens": counts.get("prompt_tokens", 0),
        "output_tokens": counts.get("completion_tokens", 0),
        "device_seconds": counts.get("device_microseconds", 0) / 1e6,
    }


def _read(location: str) -> tuple[KeyUsage, str | None]:
    """Return the counts and the version of the file; None if a bucket has no file yet."""
    try:
        found = read_version(location)
        return _decode(found.data), found.version
    except StoreError as error:
        if is_missing(error):
            return {}, "" if is_local(location) else None
        raise
    except msgspec.DecodeError as error:
        raise StoreError(f"{location} is damaged ({error}); remove it to continue from the counts in Redis") from error
