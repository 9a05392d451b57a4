"""The JSONL that a plan's offsets point into: hashed while it is validated, and known again later
by its size and time, or by its hash.
"""

from typing import BinaryIO

from jobs.batch.manifest import Manifest, save_manifest
from jobs.store.storage import StoreError, open_input, sha256_of, size_of, stamp_of


def note_source(manifest: Manifest, location: str, sha256: str) -> None:
    """Records what the source is, after it was read in full."""
    manifest.source, manifest.source_sha256 = location, sha256
    manifest.source_bytes, manifest.source_mtime_ns = stamp_of(location) or (0, 0)


def is_whole(manifest: Manifest) -> bool:
    """Return whether the source still holds what was validated; reads all of it. Raise
    `StoreError`.
    """
    if manifest.source is None or size_of(manifest.source) != manifest.source_bytes:
        return False
    return sha256_of(manifest.source) == manifest.source_sha256


def open_source(manifest: Manifest, buffered: bool = True) -> BinaryIO:
    """The source, for the holder of `storage.exclusive`; all of it is read only if it was touched.

    Read single lines without a buffer, which would be filled anew for each.

    Raises `StoreError` if it changed, other than that lines were appended to an open batch.
    """
    assert manifest.source is not None, "validate names it"
    if manifest.is_open:
        return open_input(manifest.source, buffered)
    stamp = stamp_of(manifest.source)
    if stamp != (manifest.source_bytes, manifest.source_mtime_ns):
        if stamp is None or not is_whole(manifest):
            raise StoreError(f"{manifest.source} changed while its batch runs; put the file back, or cancel the batch")
        manifest.source_mtime_ns = stamp[1]
        save_manifest(manifest)
    return open_input(manifest.source, buffered)
