"""Complete runs: a note beside the output replaces the run's folder."""

import contextlib
import errno
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

from jobs.batch.batch_folder import InputChanged, check_same
from jobs.batch.manifest import NAME, BatchSpec, Manifest, load_manifest
from jobs.protocol.unknown_members import described
from jobs.store.storage import Busy, StoreError, exclusive, sha256_of, stamp_of
from pipeline.errors import Refused
from pipeline.held_folder import RUN_LOCK
from pipeline.uris.notes import note_path, read_note, write_note

_PATIENCE_SECONDS = 5.0

log = logging.getLogger("run-batch")


class Completed(msgspec.Struct, frozen=True):
    """A run whose requests all succeeded, and the stamp of its output."""

    manifest: Manifest
    """The run's manifest, without parts."""
    stamp: tuple[int, int]
    sha256: str


_DECODER = msgspec.json.Decoder(Completed)


def replace_folder(root: Path) -> None:
    """Replace the folder of an ended run by a note, unless a request failed.

    The caller holds the run's lock. A folder that cannot be replaced is kept.
    """
    with _staying(root), exclusive(str(root), _PATIENCE_SECONDS):
        if leave_note(root):
            _remove(root)


def leave_note(root: Path) -> bool:
    """Store the note of a run if it is complete; return whether it is. Raise `StoreError`."""
    manifest = load_manifest(str(root))
    if manifest is None or manifest.state != "completed" or manifest.failed or manifest.output is None:
        return False
    stamp = stamp_of(manifest.output)
    if stamp is None:
        return False
    digest = sha256_of(manifest.output)
    write_note(Path(manifest.output), Completed(msgspec.structs.replace(manifest, parts=[]), stamp, digest))
    return True


def find_completed(root: Path, output: Path, spec: BatchSpec) -> Manifest | None:
    """Return the manifest of the same run if it is complete.

    Remove a note whose output was removed. Raise `Refused` if the input, a flag or the output has
    changed since.
    """
    noted = read_note(output, _DECODER)
    if noted is None:
        return None
    stamp = stamp_of(str(output))
    if stamp is None or not _is_left(root, noted.manifest):
        if stamp is None:
            log.info("%s was removed after the run finished: starting over", output)
        note_path(output, Completed).unlink(missing_ok=True)
        return None
    _check_unchanged(noted, output, stamp, spec)
    return noted.manifest


def finish_removal(root: Path, found: Manifest, is_held: bool, keep_parts: bool) -> bool:
    """Remove the rest of a complete run's folder, but with `keep_parts` only what an interrupted
    removal left; return whether the folder is kept. Take the run's lock unless it `is_held`.
    """
    if keep_parts and (root / NAME).is_file():
        return True
    with _staying(root), contextlib.nullcontext() if is_held else exclusive(str(root), 0, RUN_LOCK):
        if _is_left(root, found):
            _remove(root)
    return False


def is_noted(path: Path) -> bool:
    """Return whether a file is the output of a complete run."""
    return note_path(path, Completed).is_file()


def _check_unchanged(noted: Completed, output: Path, stamp: tuple[int, int], spec: BatchSpec) -> None:
    found, again = noted.manifest, "remove that file, or name another output"
    try:
        check_same(found, spec, str(output), again)
    except InputChanged as error:
        raise Refused(str(error)) from None
    if spec.strict_parameters and found.unknown_members:
        raise Refused(f"{output} was made from lines with unknown members, {described(found.unknown_members)}; {again}")
    if stamp != noted.stamp and (stamp[0] != noted.stamp[0] or sha256_of(str(output)) != noted.sha256):
        raise Refused(f"{output} has changed since the run completed it; {again}")


def _is_left(root: Path, found: Manifest) -> bool:
    """Return whether the folder has no other run, only remains of the complete one."""
    there = load_manifest(str(root))
    return there is None or there.batch_id == found.batch_id


@contextlib.contextmanager
def _staying(root: Path) -> Iterator[None]:
    """Log why the folder cannot be removed, unless it is gone."""
    try:
        yield
    except (Busy, StoreError, OSError) as error:
        if root.exists():
            log.warning("%s stays, though the run is complete: %s", root, error)


def _remove(root: Path) -> None:
    """Remove the folder, its manifest first and its lock last. Raise OSError."""
    lock = root / RUN_LOCK
    (root / NAME).unlink(missing_ok=True)
    for path in root.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path != lock:
            path.unlink(missing_ok=True)
    lock.unlink(missing_ok=True)
    try:
        root.rmdir()
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:  # the next run has made its lock, or NFS keeps open files
            raise
