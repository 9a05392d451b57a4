"""Complete runs: a note beside the output replaces the run's folder."""

import contextlib
import logging
import shutil
from pathlib import Path

import msgspec

from jobs.batch.batch_folder import InputChanged, check_same
from jobs.batch.manifest import BatchSpec, Manifest, load_manifest
from jobs.protocol.unknown_members import described
from jobs.store.storage import Busy, StoreError, exclusive, stamp_of
from pipeline.errors import Refused
from pipeline.held_folder import RUN_LOCK, held
from pipeline.uris.notes import note_path, read_note, write_note

_PATIENCE_SECONDS = 5.0

log = logging.getLogger("run-batch")


class Completed(msgspec.Struct, frozen=True):
    """A run whose requests all succeeded, and the stamp of its output."""

    manifest: Manifest
    """The run's manifest, without parts."""
    stamp: tuple[int, int]


_DECODER = msgspec.json.Decoder(Completed)


def replace_folder(root: Path) -> None:
    """Replace the folder of an ended run by a note, unless a request failed.

    The caller holds the run's lock. A folder that cannot be replaced is kept.
    """
    try:
        with exclusive(str(root), _PATIENCE_SECONDS):
            if leave_note(root):
                _remove(root)
    except (Busy, StoreError) as error:
        log.warning("the run is complete, but its folder %s could not be removed: %s", root, error)


def leave_note(root: Path) -> bool:
    """Store the note of a run if it is complete; return whether it is. Raise `StoreError`."""
    manifest = load_manifest(str(root))
    if manifest is None or manifest.state != "completed" or manifest.failed or manifest.output is None:
        return False
    stamp = stamp_of(manifest.output)
    if stamp is None:
        return False
    write_note(Path(manifest.output), Completed(msgspec.structs.replace(manifest, parts=[]), stamp))
    return True


def find_completed(root: Path, output: Path, spec: BatchSpec) -> Manifest | None:
    """Return the manifest of the same run if it is complete; finish the removal of its folder.

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
    if root.exists():
        with held(str(root), f"another run is at work on {root}: wait for it, or stop it", lock=RUN_LOCK):
            _remove(root)
    return noted.manifest


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
    if stamp != noted.stamp:
        raise Refused(f"{output} has changed since the run completed it; {again}")


def _is_left(root: Path, found: Manifest) -> bool:
    """Return whether the folder has no other run, only remains of the complete one."""
    there = load_manifest(str(root))
    return there is None or there.batch_id == found.batch_id


def _remove(root: Path) -> None:
    """Remove the folder, its lock last."""
    for path in root.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != RUN_LOCK:
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        (root / RUN_LOCK).unlink(missing_ok=True)
        root.rmdir()
