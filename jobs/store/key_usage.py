"""What was computed for each API key: a file of the file store. Where Redis has less, since it went
back or came back empty, it is raised to what the file has.
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
    """Return the counts as they were saved last.

    Raise `StoreError`.
    """
    return _read(str(store / FILE))[0]


def save_usage(store: PurePath, usage: KeyUsage) -> KeyUsage:
    """Raise the counts of the file to these, durably, and return what it has: a leader that was
    deposed may write late.

    Raise `StoreError` and `Busy`.
    """
    location = str(store / FILE)
    with exclusive(str(store), _LOCK_SECONDS, f".{FILE}.lock") if is_local(location) else contextlib.nullcontext():
        written = None
        while written is None:  # as long as another leader writes in a bucket meanwhile
            saved, version = _read(location)
            usage = larger(saved, usage)
            data = msgspec.json.format(msgspec.json.encode(usage), indent=1)
            written = write_version(location, data, version)
    return usage


def larger(one: KeyUsage, other: KeyUsage) -> KeyUsage:
    """Return the larger of each two counts; those of 0 are left out."""
    return {key_id: dict(Counter(one.get(key_id)) | Counter(other.get(key_id))) for key_id in one | other}


def behind(found: KeyUsage, saved: KeyUsage) -> KeyUsage:
    """Return what was saved of the keys of which less was found."""
    return {key_id: counts for key_id, counts in saved.items() if Counter(counts) - Counter(found.get(key_id))}


def usage_object(counts: dict[str, int]) -> dict[str, Any]:
    """Return the counts of a key as the `usage` of a batch has them."""
    return {
        "input_tokens": counts.get("prompt_tokens", 0),
        "output_tokens": counts.get("completion_tokens", 0),
        "device_seconds": counts.get("device_microseconds", 0) / 1e6,
    }


def _read(location: str) -> tuple[KeyUsage, str | None]:
    """Return the counts, and which version of the file they are; None for none in a bucket yet."""
    try:
        found = read_version(location)
        return _decode(found.data), found.version
    except StoreError as error:
        if is_missing(error):
            return {}, "" if is_local(location) else None
        raise
    except msgspec.DecodeError as error:
        raise StoreError(f"{location} is damaged ({error}); remove it to count on from what Redis has") from error
