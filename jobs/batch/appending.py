"""Open batches wherever they are: in a folder, or in a bucket."""

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

_TRY_SECONDS = 60.0  # that one append goes on while others come before it
_PAUSE_SECONDS = 0.05


def requests_of(spec: BatchSpec) -> OpenRequests:
    """Return the requests of an open batch."""
    return OpenRequests(spec) if is_local(spec.root) else BucketRequests(spec)


def take_appended(manifest: Manifest, check: Callable[[], object]) -> None:
    """Note in the manifest what was appended so far; once the batch is closed, it has all that it
    has of any other. Calls `check` often.

    Raise `StoreError`, and what `check` raises.
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
    """Return those of source and plan."""
    return sha256_of(manifest.spec.input, check), sha256_of(join(manifest.spec.root, PLAN_NAME), check)


def _write_files(manifest: Manifest, check: Callable[[], object]) -> tuple[str, str]:
    """Make the files of a closed batch, which until then is in pieces; return as `_hashes`."""
    files = AppendedFiles(manifest.spec.root)
    manifest.made = new_name(manifest.spec.root, MADE)
    files.write(join(manifest.made_root, INDEX_NAME), check)
    return files.write(manifest.spec.input, check), files.write(join(manifest.made_root, PLAN_NAME), check)


class BucketRequests(OpenRequests):
    """The requests of an open batch in a bucket (`appended`). An append counts with a conditional
    put: of several processes one comes first, and the others look again at what the batch has.
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
        except ApiError:  # it has ended
            return
        raise StoreError(f"others append to {self._spec.root} without a pause: try again")

    def _tries(self) -> Iterator[Appended]:
        """Yield what was appended, again and again. Raise `ApiError` 409 where the batch has
        ended.
        """
        deadline = time.monotonic() + _TRY_SECONDS
        while time.monotonic() < deadline:
            with self._until_removed():
                found = read_appended(self._spec.root)
            yield found
            time.sleep(random.uniform(0, _PAUSE_SECONDS))  # of two that come at once, one is the first

    @contextlib.contextmanager
    def _until_removed(self) -> Iterator[None]:
        """Refuse as a closed batch one that has ended."""
        try:
            yield
        except StoreError as error:
            if is_missing(error):
                raise closed_error() from None
            raise
