"""API keys: records under `keys/` of the file store, one file each.

A key's secret is shown once; what is kept is its SHA-256.
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
"""What the name of a tenant looks like; "" is the tenant of a server without keys."""

_SUFFIX = ".json"
_RECHECK_SECONDS = 1.0
# A folder that changed less long ago may change again under the same time stamp
_SETTLED_NS = 2 * 10**9

logger = logging.getLogger(__name__)

Limit = Annotated[int, msgspec.Meta(ge=1, le=MAX_LIMIT)]
Weight = Annotated[float, msgspec.Meta(ge=LEAST_WEIGHT, le=MOST_WEIGHT)]


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One key. A limit of None is none; all keys of a tenant see the same files and batches."""

    id: str
    sha256: str
    tenant: str
    name: str
    created_at: int  # unix seconds
    requests_per_minute: Limit | None = None
    # Of all open batches of the tenant; one that goes beyond fails
    queued_tokens: Limit | None = None
    open_batches: Limit | None = None  # of the tenant: those that have not ended
    # Of the tenant, among all that wait; None: that of an older key of the tenant, or 1
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
    """A new key, on disk when this returns, and its secret, which is not stored.

    Raises ValueError and `StoreError`.
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
    keep_folder(str(folder))  # from then on no request is admitted without a key
    write_bytes(str(folder / (record.id + _SUFFIX)), content)
    return record, secret


def list_keys(store: str) -> list[KeyRecord]:
    """Every key that is not revoked, the oldest first; damaged records are passed over with a word
    in the log. Raises `StoreError`.
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
    """End a key; servers notice within about a second.

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
    """Return the folder with the records of a file store's keys. Raises `StoreError`."""
    return store_root(store) / FOLDER


@dataclass(frozen=True, slots=True)
class KnownKeys:
    """The keys of a file store as they were found."""

    exist: bool = False
    """Whether there ever was a key: the folder is there. Who revokes the last one does not mean to
    let everybody in.
    """
    by_hash: Mapping[str, KeyRecord] = field(default_factory=dict)
    by_id: Mapping[str, KeyRecord] = field(default_factory=dict)
    """Of damaged records what they were before."""
    problems: Mapping[str, str] = field(default_factory=dict)
    """Of damaged records, by id."""

    @property
    def are_required(self) -> bool:
        """Whether a caller needs a key: there is one, be its record damaged."""
        return bool(self.by_hash or self.problems)

    def find(self, secret: str) -> KeyRecord | None:
        """Return the key with this secret."""
        return self.by_hash.get(_hash(secret))

    def weights(self) -> dict[str, float]:
        """Return the weights of tenants: of each that of its newest key which names one. Damaged
        records count as they were.
        """
        known = (record for _, record in sorted(self.by_id.items()))
        return {record.tenant: record.weight for record in known if record.weight is not None}


class KeyRing:
    """The keys of a file store as a server knows them: read again when the folder changed, looked
    at once a second at most. Thread-safe.

    `look` and `latest` raise `KeysUnreadable` while a folder that is there, or was, cannot be read:
    then no request may be admitted.
    """

    def __init__(self, store: str) -> None:
        self._folder = folder_of(store)
        self._lock = threading.Lock()
        self._keys = KnownKeys()
        self._stamp: FolderStamp | None = None  # of the folder as it was read
        self._failure: str | None = None
        self._next_look = 0.0

    @property
    def due(self) -> bool:
        """Whether `look` would ask the store."""
        return time.monotonic() >= self._next_look

    @property
    def latest(self) -> KnownKeys:
        """What the last look found."""
        if self._failure is not None:
            raise KeysUnreadable(self._failure)
        return self._keys

    def look(self) -> KnownKeys:
        """Return the keys, for which the store is asked where that is due."""
        with self._lock:
            if self.due:
                self._failure = self._refresh()
                self._next_look = time.monotonic() + _RECHECK_SECONDS
            return self.latest

    def _refresh(self) -> str | None:
        """What keeps the folder from being read."""
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
    """Return the keys, the oldest first, and a sentence for each unusable record, by id.

    Raises `StoreError`.
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
    """Raise `StoreError` and ValueError."""
    record = _decode(read_bytes(str(path)))
    if record.id + _SUFFIX != path.name or not TENANT.fullmatch(record.tenant):
        raise ValueError("its id or its tenant cannot be right")
    return record


def _unreadable(folder: PurePath, error: StoreError) -> str:
    reason = error.__cause__.strerror if isinstance(error.__cause__, OSError) else error
    return f"the folder of keys {folder} cannot be read: {reason}"


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
