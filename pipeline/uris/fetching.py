"""Fetch an input into the folder of its run, whole and on disk, once."""

import contextlib
import hashlib
import logging
from pathlib import Path

import msgspec

from jobs.store.storage import AtomicWriter, StoreError, list_names, make_folder, read_bytes, sweep, write_bytes
from pipeline.errors import Refused
from pipeline.private_folder import RUN_LOCK
from pipeline.uris.addresses import AllowedHosts
from pipeline.uris.opened import OpenSource, SourceStamp
from pipeline.uris.stores import open_stored
from pipeline.uris.uri import Uri

FOLDER = "input"
"""In the folder of a run."""

_NOTE_SUFFIX = ".fetched"

log = logging.getLogger("run-batch")


class Fetched(msgspec.Struct, frozen=True):
    """What was fetched."""

    uri: str
    """Without its secrets."""
    digest: str
    """Of the whole URI."""
    stamp: SourceStamp


def open_source(uri: Uri, allowed: AllowedHosts) -> contextlib.AbstractContextManager[OpenSource]:
    """Open an input. Raise `Refused` and `Unfinished`."""
    if uri.is_folder:
        from pipeline.uris.datasets import open_dataset

        return open_dataset(uri)
    if not uri.is_http:
        return open_stored(uri)
    from pipeline.uris.web import open_web

    return open_web(uri, allowed)


def fetch(uri: Uri, path: Path, allowed: AllowedHosts, has_begun: bool) -> None:
    """Make the input a local file, unless it is there already; for the holder of the run's folder.

    A run that has begun goes on with what it fetched. Raise `Refused` if the input has changed
    since, or cannot be used, `Unfinished` and `StoreError`.
    """
    folder = str(path.parent)
    with open_source(uri, allowed) as source:
        digest = hashlib.sha256(uri.text.encode()).hexdigest()
        known, found = _read_note(path), Fetched(str(uri), digest, source.stamp)
        if known == found and path.is_file():
            return
        if has_begun and known is not None:
            raise Refused(
                f"{_difference(known, found, path.parent.parent)}; remove that folder, or name another output"
            )
        log.info("fetching %s", uri)
        make_folder(folder)
        sweep(folder)
        with AtomicWriter(str(path)) as writer:
            for chunk in source.chunks:
                writer.write(chunk)
            writer.commit()
        write_bytes(str(_note_path(path)), msgspec.json.encode(found))


def holds_input_alone(root: Path) -> bool:
    """Return whether nothing of a run is in its folder but what was fetched."""
    return bool(names := set(list_names(str(root)))) and names <= {FOLDER, RUN_LOCK}


def _difference(known: Fetched, found: Fetched, root: Path) -> str:
    if known.uri != found.uri:
        return f"{root} was begun with {known.uri}, not {found.uri}"
    if known.digest != found.digest:
        return f"{root} was begun with another URI of {found.uri}, such as another query"
    return f"{found.uri} has changed since {root} was begun"


def _read_note(path: Path) -> Fetched | None:
    with contextlib.suppress(StoreError, msgspec.DecodeError):
        return msgspec.json.decode(read_bytes(str(_note_path(path))), type=Fetched)
    return None


def _note_path(path: Path) -> Path:
    return path.with_name(f".{path.name}{_NOTE_SUFFIX}")
