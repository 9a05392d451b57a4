"""Upload results, and check before a run that this will be possible.

A process of its own does it: pyarrow publishes what a stream has so far when the stream is closed
or freed, and only a process that ends at once leaves no half object behind.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from jobs.process import die_with_parent
from jobs.store.storage import StoreError, read_bytes, sha256_of, write_bytes
from pipeline.errors import Interrupted, Refused, Unfinished
from pipeline.signals import Signals
from pipeline.uris.opened import SourceStamp
from pipeline.uris.partitions import SUCCESS
from pipeline.uris.stores import infos_below, stamp_of_files, stamp_of_stored
from pipeline.uris.upload_process import UploadOrder
from pipeline.uris.uri import Uri

_NOTE_SUFFIX = ".uploaded"
_AGAIN = "run the same command again to upload them"


class Uploaded(msgspec.Struct, frozen=True):
    """What was uploaded, and what is stored since; None if that may not be read."""

    sha256: str
    uri: str
    partition_by: tuple[str, ...]
    stored: SourceStamp | None


def check_writable(uri: Uri) -> None:
    """Raise `Refused` unless the file can be written, and `Unfinished`; nothing is written."""
    _run(UploadOrder(uri.text, None), lambda process: process.wait())


def upload(path: Path, uri: Uri, partition_by: tuple[str, ...], signals: Signals, say: Callable[[str], None]) -> None:
    """Make a local file of results the object `uri`, which is whole or as it was before, or the
    folder `uri`, by columns; nothing is done where that is there.

    Raise `Refused`, `Unfinished` and `Interrupted`.
    """
    note = path.with_name(f".{path.name}{_NOTE_SUFFIX}")
    known = _read_note(note)

    def wait(process: subprocess.Popen[bytes]) -> None:
        while process.poll() is None:
            signals.wait(1.0)
            if signals.stops:
                raise Interrupted(f"Interrupted: the results are in {path}, {_AGAIN}.")

    try:
        if known is not None and known.stored is not None and known == _uploaded(path, uri, partition_by):
            return
        say(f"writing the results to {uri}")
        _run(UploadOrder(uri.text, str(path), partition_by), wait)
        write_bytes(str(note), msgspec.json.encode(_uploaded(path, uri, partition_by)))
    except (Refused, Unfinished) as end:
        raise Unfinished(f"{end.message}; the results are in {path}, {_AGAIN}") from None


def _uploaded(path: Path, uri: Uri, partition_by: tuple[str, ...]) -> Uploaded:
    stored = None
    with contextlib.suppress(Refused):  # of a user who may write there, and not read
        stored = stamp_of_stored(uri / SUCCESS if partition_by else uri)
        if partition_by and stored is not None:
            stored = stamp_of_files(infos_below(uri))
    return Uploaded(sha256_of(str(path)), str(uri), partition_by, stored)


def _read_note(note: Path) -> Uploaded | None:
    with contextlib.suppress(StoreError, msgspec.DecodeError):
        return msgspec.json.decode(read_bytes(str(note)), type=Uploaded)
    return None


def _run(order: UploadOrder, wait: Callable[[subprocess.Popen[bytes]], object]) -> None:
    with tempfile.TemporaryFile() as asked, tempfile.TemporaryFile() as said:
        asked.write(msgspec.json.encode(order))  # not as an argument, since a URI may hold secrets
        asked.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pipeline.uris.upload_process"],
            stdin=asked,
            stderr=said,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        try:
            wait(process)
        finally:
            process.kill()
            process.wait()
        said.seek(0)
        why = said.read().decode(errors="replace").strip().rpartition("\n")[2]
    if process.returncode:
        end = Refused if process.returncode == Refused.exit_code else Unfinished
        raise end(why or f"the process that writes {Uri(order.uri)} ended with {process.returncode}")
