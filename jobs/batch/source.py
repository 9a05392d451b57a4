"""The source: the JSONL file of the plan's offsets.

It is hashed when it is validated, and recognized later by its size and time, or by its hash.
"""

from typing import BinaryIO

from jobs.batch.appended import AppendedFiles
from jobs.batch.line_index import LineIndex
from jobs.batch.manifest import Manifest, save_manifest
from jobs.batch.plan import PLAN_NAME
from jobs.store.storage import StoreError, is_local, join, open_input, sha256_of, size_of, stamp_of


def note_source(manifest: Manifest, location: str, sha256: str) -> None:
    """Record the source in the manifest, after it was read in full."""
    manifest.source, manifest.source_sha256 = location, sha256
    manifest.source_bytes, manifest.source_mtime_ns = stamp_of(location) or (0, 0)


def is_whole(manifest: Manifest) -> bool:
    """Return whether the source has its validated content; reads all of it.

    Raise `StoreError`.
    """
    if manifest.source is None or size_of(manifest.source) != manifest.source_bytes:
        return False
    return sha256_of(manifest.source) == manifest.source_sha256


def open_source(manifest: Manifest, buffered: bool = True) -> BinaryIO:
    """Return the source; it is read in full only if its stamp changed.

    The caller must hold `storage.exclusive`. Read single lines unbuffered, since each would fill
    the buffer. Raise `StoreError` if it changed, other than by appends to an open batch.
    """
    assert manifest.source is not None, "validate names it"
    if is_in_pieces(manifest):
        return _appended_files(manifest).open_input(manifest.source)
    if manifest.is_open:
        return open_input(manifest.source, buffered)
    if not is_local(manifest.spec.root):  # the batch has a copy there that no process changes
        return open_input(manifest.source, buffered, unchanging=True)
    stamp = stamp_of(manifest.source)
    if stamp != (manifest.source_bytes, manifest.source_mtime_ns):
        if stamp is None or not is_whole(manifest):
            raise StoreError(f"{manifest.source} changed while its batch runs; put the file back, or cancel the batch")
        manifest.source_mtime_ns = stamp[1]
        save_manifest(manifest)
    return open_input(manifest.source, buffered)


def open_plan(manifest: Manifest) -> BinaryIO:
    """Return the plan of a validated batch. Raise `StoreError`."""
    location = join(manifest.made_root, PLAN_NAME)
    if is_in_pieces(manifest):
        return _appended_files(manifest).open_input(location)
    return open_input(location, unchanging=True)


def open_lines(manifest: Manifest) -> LineIndex:
    """Return the lines of a validated batch by number. Raise `StoreError`."""
    source = manifest.source or manifest.spec.input
    if is_in_pieces(manifest):
        return LineIndex(manifest.made_root, source, _appended_files(manifest).open_at)
    return LineIndex(manifest.made_root, source)


def is_in_pieces(manifest: Manifest) -> bool:
    """Return whether source, plan and line index are still in pieces."""
    return manifest.is_open and not is_local(manifest.spec.root)


def _appended_files(manifest: Manifest) -> AppendedFiles:
    found: AppendedFiles = manifest.__dict__.setdefault("appended_files", AppendedFiles(manifest.spec.root))
    return found
