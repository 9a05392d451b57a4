"""Upload of results, and the check before a run that it will be possible."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from jobs.store.storage import sha256_of
from pipeline.errors import Refused, Unfinished
from pipeline.signals import Signals
from pipeline.uris.notes import read_note, write_note
from pipeline.uris.opened import SourceStamp
from pipeline.uris.order_process import run_order
from pipeline.uris.partitions import SUCCESS
from pipeline.uris.stores import infos_below, stamp_of_files, stamp_of_stored
from pipeline.uris.upload_process import UploadOrder
from pipeline.uris.uri import Uri

_PROGRAM = "pipeline.uris.upload_process"


class Uploaded(msgspec.Struct, frozen=True):
    """The note on an upload; `stored` is None if the store may not be read."""

    sha256: str
    uri: str
    partition_by: tuple[str, ...]
    stored: SourceStamp | None


_DECODER = msgspec.json.Decoder(Uploaded)


def check_writable(uri: Uri, partition_by: tuple[str, ...]) -> None:
    """Raise `Refused` unless results can be written; write no result.

    Raise `Unfinished` and `Interrupted`.
    """
    with Signals() as signals:
        order = UploadOrder(uri=uri.text, path=None, partition_by=partition_by)
        run_order(_PROGRAM, order, signals, "Interrupted: nothing was run.")


def upload(path: Path, uri: Uri, partition_by: tuple[str, ...], signals: Signals, say: Callable[[str], None]) -> None:
    """Upload a local file of results to the object `uri`, or by columns to the folder `uri`.

    An object is replaced atomically. Results that are already uploaded are skipped. Raise
    `Unfinished` and `Interrupted`.
    """
    known, where = read_note(path, _DECODER), f"the results are in {path}"
    try:
        if known is not None and known.stored is not None and known == _uploaded(path, uri, partition_by):
            return
        say(f"writing the results to {uri}")
        order = UploadOrder(uri=uri.text, path=str(path), partition_by=partition_by)
        run_order(_PROGRAM, order, signals, f"Interrupted: {where}, run the same command again to upload them.")
        write_note(path, _uploaded(path, uri, partition_by))
    except (Refused, Unfinished) as end:
        again = "run the command again to upload them, or copy them from there"
        raise Unfinished(f"{end.message}; {where}: {again}") from None


def _uploaded(path: Path, uri: Uri, partition_by: tuple[str, ...]) -> Uploaded:
    stored = None
    with contextlib.suppress(Refused):  # the user may have only write access
        stored = stamp_of_stored(uri / SUCCESS if partition_by else uri)
        if partition_by and stored is not None:
            stored = stamp_of_files(infos_below(uri))
    return Uploaded(sha256_of(str(path)), str(uri), partition_by, stored)
