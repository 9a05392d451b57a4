"""Open batches in a folder or in a bucket."""

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec

from jobs.batch.appended import (
    Appended,
    AppendedFiles,
    Committed,
    begin,
    find_known,
    merge_pieces,
    read_appended,
    replace_appended,
    write_piece,
)
from jobs.batch.line_index import INDEX_NAME
from jobs.batch.manifest import MADE, BatchSpec, Manifest
from jobs.batch.open_requests import AppendOutcome, CheckedLines, OpenRequests, closed_error
from jobs.batch.plan import PLAN_NAME
from jobs.batch.source import note_source
from jobs.batch.source_check import estimated_tokens
from jobs.protocol.results import ApiError
from jobs.store.storage import StoreError, is_local, is_missing, join, new_name, sha256_of

_TRY_SECONDS = 60.0  # how long one append retries after other appends came first
_PAUSE_SECONDS = 0.05


def requests_of(spec: BatchSpec) -> OpenRequests:
    """Return the requests of an open batch."""
    return OpenRequests(spec) if is_local(spec.root) else BucketRequests(spec)


def take_appended(manifest: Manifest, check: Callable[[], object]) -> None:
    """Record the appended lines in the manifest; for a closed batch also write its files.

    Calls `check` often. Raise `StoreError`, and what `check` raises.
    """
    spec = manifest.spec
    found = requests_of(spec).committed()
    manifest.source, manifest.total = spec.input, found.lines
    manifest.models, manifest.endpoints = found.models, found.endpoints
    manifest.queued_tokens = estimated_tokens(found.body_bytes)
    if found.appended_at:
        manifest.timestamps["appended"] = found.appended_at
    if found.closed:
        hashes = _hashes(manifest, check) if is_local(spec.root) else _write_files(manifest, check)
        manifest.input_sha256, manifest.plan_sha256 = hashes
        manifest.input_bytes = found.bytes
        note_source(manifest, spec.input, manifest.input_sha256)


def _hashes(manifest: Manifest, check: Callable[[], object]) -> tuple[str, str]:
    """Return the hashes of source and plan."""
    return sha256_of(manifest.spec.input, check), sha256_of(join(manifest.spec.root, PLAN_NAME), check)


def _write_files(manifest: Manifest, check: Callable[[], object]) -> tuple[str, str]:
    """Write the files of a closed batch from its pieces; return their hashes."""
    files = AppendedFiles(manifest.spec.root)
    manifest.made = new_name(manifest.spec.root, MADE)
    files.write(join(manifest.made_root, INDEX_NAME), check)
    return files.write(manifest.spec.input, check), files.write(join(manifest.made_root, PLAN_NAME), check)


class BucketRequests(OpenRequests):
    """The requests of an open batch in a bucket (`appended`).

    A conditional put commits an append: among several processes one succeeds, and the others read
    the batch again.
    """

    def create(self) -> None:
        begin(self._spec.root)

    def committed(self) -> Committed:
        return read_appended(self._spec.root).committed

    def commit(self, appends: Sequence[CheckedLines]) -> list[AppendOutcome | ApiError]:
        root = self._spec.root
        for found in self._tries():
            new, outcomes = self._taken(found.committed, appends, partial(find_known, root, found.pieces))
            if not new.entries:
                return outcomes
            piece = write_piece(root, new.entries, new.planned, new.known, b"".join(new.content))
            if replace_appended(root, found, new.taken, merge_pieces(root, [*found.pieces, piece])):
                return outcomes
        raise StoreError(f"others append to {root} without a pause: try again")

    def close(self) -> None:
        try:
            for found in self._tries():
                closed = msgspec.structs.replace(found.committed, closed=True)
                if found.committed.closed or replace_appended(self._spec.root, found, closed, found.pieces):
                    return
        except ApiError:  # the batch has ended
            return
        raise StoreError(f"others append to {self._spec.root} without a pause: try again")

    def _tries(self) -> Iterator[Appended]:
        """Yield the list of committed pieces for each attempt. Raise `ApiError` 409 if the batch
        has ended.
        """
        deadline = time.monotonic() + _TRY_SECONDS
        while time.monotonic() < deadline:
            with self._until_removed():
                found = read_appended(self._spec.root)
            yield found
            time.sleep(random.uniform(0, _PAUSE_SECONDS))  # a random pause separates two concurrent appends

    @contextlib.contextmanager
    def _until_removed(self) -> Iterator[None]:
        """Treat a batch that has ended as closed."""
        try:
            yield
        except StoreError as error:
            if is_missing(error):
                raise closed_error() from None
            raise
