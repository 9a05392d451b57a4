"""API keys: records under `keys/` of the file store, one file each.

A key's secret is shown once; only its SHA-256 is stored.
"""

import hashlib
import logging
import re
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Annotated

import msgspec

from jobs.protocol import ids
from jobs.protocol.priority import LEAST_WEIGHT, MOST_WEIGHT
from jobs.store.storage import (
    FolderStamp,
    StoreError,
    delete,
    folder_stamp_of,
    is_missing,
    keep_folder,
    named,
    read_bytes,
    size_of,
    sizes_in,
    sync_folder,
    write_bytes,
)
from jobs.store.store_folder import store_root

FOLDER = "keys"
MAX_LIMIT = 10**12
TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
"""The valid names of a tenant; "" is the tenant of a server without keys."""

_SUFFIX = ".json"
_RECHECK_SECONDS = 1.0
# A folder that changed recently may change again without a new time stamp.
_SETTLED_NS = 2 * 10**9

logger = logging.getLogger(__name__)

Limit = Annotated[int, msgspec.Meta(ge=1, le=MAX_LIMIT)]
Weight = Annotated[float, msgspec.Meta(ge=LEAST_WEIGHT, le=MOST_WEIGHT)]


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One key. A limit of None means no limit; all keys of a tenant see the same files and
    batches.
    """

    id: str
    sha256: str
    tenant: str
    name: str
    created_at: int  # unix seconds
    requests_per_minute: Limit | None = None
    # Limits of all open batches of the tenant; a batch that exceeds this one fails.
    queued_tokens: Limit | None = None
    open_batches: Limit | None = None  # most batches of the tenant that have not ended
    # Of the tenant, relative to all tenants that wait; None: that of an older key of the tenant, or
    # 1.
    weight: Weight | None = None


_decode = msgspec.json.Decoder(KeyRecord).decode


class KeysUnreadable(StoreError):
    """The folder of keys cannot be read, so no request can be authenticated."""


def create_key(
    store: str,
    *,
    tenant: str,
    name: str = "",
    requests_per_minute: int | None = None,
    queued_tokens: int | None = None,
    open_batches: int | None = None,
    weight: float | None = None,
) -> tuple[KeyRecord, str]:
    """Create a key, durably, and return it with its secret, which is not stored.

    Raise ValueError and `StoreError`.
    """
    if not TENANT.fullmatch(tenant):
        raise ValueError(
            f"a tenant is named by up to 64 letters, digits, dots, dashes, underscores and @, not {tenant!r}"
        )
    for limit in (requests_per_minute, queued_tokens, open_batches):
        if limit is not None and not 1 <= limit <= MAX_LIMIT:
            raise ValueError(f"a limit is a number from 1 to {MAX_LIMIT:,}, not {limit:,}")
    if weight is not None and not LEAST_WEIGHT <= weight <= MOST_WEIGHT:
        raise ValueError(f"a weight is a number from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}, not {weight:g}")
    secret = f"sk-{secrets.token_urlsafe(32)}"
    record = KeyRecord(
        id=ids.new_id(ids.KEY, time.time()),
        sha256=_hash(secret),
        tenant=tenant,
        name=name,
        created_at=int(time.time()),
        requests_per_minute=requests_per_minute,
        queued_tokens=queued_tokens,
        open_batches=open_batches,
        weight=weight,
    )
    folder = folder_of(store)
    content = msgspec.json.format(msgspec.json.encode(record), indent=1)
    keep_folder(str(folder))  # from now on no request is admitted without a key
    write_bytes(str(folder / (record.id + _SUFFIX)), content)
    return record, secret


def list_keys(store: str) -> list[KeyRecord]:
    """Return every key that is not revoked, oldest first.

    Skip damaged records and log each. Raise `StoreError`.
    """
    folder = folder_of(store)
    try:
        if folder_stamp_of(str(folder)) is None:
            return []
        records, problems = _read_folder(folder)
    except StoreError as error:
        raise KeysUnreadable(_unreadable(folder, error)) from error
    for problem in problems.values():
        logger.error("%s", problem)
    return records


def revoke_key(store: str, key_id: str) -> None:
    """Revoke a key; servers notice within about a second.

    Raise KeyError if there is none of this id, and `StoreError`.
    """
    folder = folder_of(store)
    if not ids.is_id(ids.KEY, key_id):
        raise KeyError(key_id)
    key = str(folder / (key_id + _SUFFIX))
    if size_of(key) is None:
        raise KeyError(key_id)
    delete(key)
    with named("cannot remove", key):
        sync_folder(folder)


def folder_of(store: str) -> PurePath:
    """Return the folder with the records of a file store's keys. Raise `StoreError`."""
    return store_root(store) / FOLDER


@dataclass(frozen=True, slots=True)
class KnownKeys:
    """The keys of a file store as last read."""

    exist: bool = False
    """Whether a key was ever created, so that the folder exists. Revoking the last key does not
    open the server to everyone.
    """
    by_hash: Mapping[str, KeyRecord] = field(default_factory=dict)
    by_id: Mapping[str, KeyRecord] = field(default_factory=dict)
    """The valid keys; a damaged record keeps its last valid content."""
    problems: Mapping[str, str] = field(default_factory=dict)
    """A problem for each damaged record, by id."""

    @property
    def are_required(self) -> bool:
        """Return whether a caller needs a key: one exists, even if its record is damaged."""
        return bool(self.by_hash or self.problems)

    def find(self, secret: str) -> KeyRecord | None:
        """Return the key with this secret, or None."""
        return self.by_hash.get(_hash(secret))

    def weights(self) -> dict[str, float]:
        """Return each tenant's weight, from its newest key that sets one.

        A damaged record counts with its last valid content.
        """
        known = (record for _, record in sorted(self.by_id.items()))
        return {record.tenant: record.weight for record in known if record.weight is not None}


class KeyRing:
    """The keys of a file store for a server: read again when the folder changed.

    The folder is checked at most once a second. Thread-safe.

    `look` and `latest` raise `KeysUnreadable` while an existing or former folder cannot be read:
    then no request may be admitted.
    """

    def __init__(self, store: str) -> None:
        self._folder = folder_of(store)
        self._lock = threading.Lock()
        self._keys = KnownKeys()
        self._stamp: FolderStamp | None = None  # stamp of the folder when it was read
        self._failure: str | None = None
        self._next_look = 0.0

    @property
    def due(self) -> bool:
        """Return whether `look` would read the store."""
        return time.monotonic() >= self._next_look

    @property
    def latest(self) -> KnownKeys:
        """Return the result of the last read."""
        if self._failure is not None:
            raise KeysUnreadable(self._failure)
        return self._keys

    def look(self) -> KnownKeys:
        """Return the keys, reading the store if that is due."""
        with self._lock:
            if self.due:
                self._failure = self._refresh()
                self._next_look = time.monotonic() + _RECHECK_SECONDS
            return self.latest

    def _refresh(self) -> str | None:
        """Read the folder if it changed; return why it cannot be read, or None."""
        before = self._keys
        try:
            stamp = folder_stamp_of(str(self._folder))
            if stamp is None:
                return f"the folder of keys {self._folder} is gone" if before.exist else None
            self._keys = replace(before, exist=True)
            if stamp == self._stamp:
                return None
            records, problems = _read_folder(self._folder)
        except StoreError as error:
            return _unreadable(self._folder, error)
        for problem in set(problems.values()) - set(before.problems.values()):
            logger.error("%s", problem)
        kept = {key_id: record for key_id, record in before.by_id.items() if key_id in problems}
        by_id = kept | {record.id: record for record in records}
        self._keys = KnownKeys(True, {record.sha256: record for record in records}, by_id, problems)
        settled = not problems and time.time_ns() - stamp.changed_ns > _SETTLED_NS
        self._stamp = stamp if settled else None
        return None


def _read_folder(folder: PurePath) -> tuple[list[KeyRecord], dict[str, str]]:
    """Return the keys, oldest first, and a sentence for each unusable record, by id.

    Raise `StoreError`.
    """
    records, problems = [], {}
    for name in sorted(sizes_in(str(folder))):
        if not name.endswith(_SUFFIX) or name.startswith("."):
            continue
        try:
            records.append(_read(folder / name))
        except (StoreError, ValueError) as error:
            if not (isinstance(error, StoreError) and is_missing(error)):  # revoked just now
                problems[name.removesuffix(_SUFFIX)] = f"the key in {folder / name} is unusable: {error}"
    return records, problems


def _read(path: PurePath) -> KeyRecord:
    """Return the key in a record. Raise `StoreError` and ValueError."""
    record = _decode(read_bytes(str(path)))
    if record.id + _SUFFIX != path.name or not TENANT.fullmatch(record.tenant):
        raise ValueError("its id or its tenant is invalid")
    return record


def _unreadable(folder: PurePath, error: StoreError) -> str:
    reason = error.__cause__.strerror if isinstance(error.__cause__, OSError) else error
    return f"the folder of keys {folder} cannot be read: {reason}"


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
