"""Fetching of an input into the folder of its run, once and completely."""

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from jobs.store.storage import AtomicWriter, list_names, make_folder, sweep
from pipeline.errors import Refused, Unfinished
from pipeline.held_folder import RUN_LOCK
from pipeline.uris.addresses import AllowedHosts
from pipeline.uris.notes import read_note, write_note
from pipeline.uris.opened import OpenSource, SourceStamp
from pipeline.uris.stores import open_stored
from pipeline.uris.uri import Uri

FOLDER = "input"
"""Name of the subfolder in the folder of a run."""

_PROGRESS_SECONDS = 5.0


class Fetched(msgspec.Struct, frozen=True):
    """The note on a fetched input."""

    uri: str
    """The URI without its secrets."""
    digest: str
    """Digest of the whole URI."""
    stamp: SourceStamp


_DECODER = msgspec.json.Decoder(Fetched)


def open_source(uri: Uri, allowed: AllowedHosts) -> contextlib.AbstractContextManager[OpenSource]:
    """Open an input. Raise `Refused` and `Unfinished`."""
    if uri.is_folder:
        from pipeline.uris.datasets import open_dataset

        return open_dataset(uri)
    if not uri.is_http:
        return open_stored(uri)
    from pipeline.uris.web import open_web

    return open_web(uri, allowed)


def fetch(
    uri: Uri, path: Path, allowed: AllowedHosts, has_begun: bool, say: Callable[[str], object] = lambda line: None
) -> None:
    """Fetch the input to a local file, unless it is fetched already.

    The caller holds the lock of the run's folder. If the server is unavailable, a run uses the
    file that it fetched before. Raise `Refused` if the input has changed since a run `has_begun`,
    or cannot be used; raise `Unfinished` and `StoreError`.
    """
    folder = str(path.parent)
    with contextlib.ExitStack() as stack:
        try:
            source = stack.enter_context(open_source(uri, allowed))
        except Unfinished as end:
            if not is_fetched(uri, path):
                raise
            say(f"{end.message}; using the file that was fetched before")
            return
        known, found = read_note(path, _DECODER), Fetched(str(uri), _digest(uri), source.stamp)
        if known == found and path.is_file():
            return
        if has_begun and known is not None:
            raise Refused(
                f"{_difference(known, found, path.parent.parent)}; remove that folder, or name another output"
            )
        say(f"fetching {uri}")
        make_folder(folder)
        sweep(folder)
        with AtomicWriter(str(path)) as writer:
            for chunk in _reported(source.chunks, uri, say):
                writer.write(chunk)
            writer.commit()
        write_note(path, found)


def is_fetched(uri: Uri, path: Path) -> bool:
    """Return whether the input is already fetched; it may have changed since."""
    known = read_note(path, _DECODER)
    return known is not None and known.digest == _digest(uri) and path.is_file()


def holds_input_alone(root: Path) -> bool:
    """Return whether the folder of a run has only the fetched input."""
    return bool(names := set(list_names(str(root)))) and names <= {FOLDER, RUN_LOCK}


def _difference(known: Fetched, found: Fetched, root: Path) -> str:
    if known.uri != found.uri:
        return f"{root} was begun with {known.uri}, not {found.uri}"
    if known.digest != found.digest:
        return f"{root} was begun with another URI of {found.uri}, such as another query"
    return f"{found.uri} has changed since {root} was begun"


def _digest(uri: Uri) -> str:
    return hashlib.sha256(uri.text.encode()).hexdigest()


def _reported(chunks: Iterator[bytes], uri: Uri, say: Callable[[str], object]) -> Iterator[bytes]:
    size, last = 0, time.monotonic()
    for chunk in chunks:
        yield chunk
        size, now = size + len(chunk), time.monotonic()
        if now - last >= _PROGRESS_SECONDS:
            say(f"fetching {uri}: {size / 1e6:,.0f} MB")
            last = now
