"""The program that writes results to a store; without a path, it only checks write access.

`order_process` runs it: pyarrow publishes the data of a stream when the stream is closed or freed,
so only a process that exits at once leaves no incomplete object.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from jobs.store.storage import open_input
from pipeline.errors import Refused
from pipeline.uris.order_process import StoreOrder, carry_out
from pipeline.uris.partitions import SUCCESS, write_partitions
from pipeline.uris.stores import OBJECT_STORES, filesystem_of
from pipeline.uris.uri import Uri

_CHUNK = 8 << 20
_FLUSH_CHUNKS = 8
"""Chunks between flushes, which limit the memory for a slow store."""

_opened: list[Any] = []
"""References to the streams of stores, which would publish their data if they were freed."""


class UploadOrder(StoreOrder, frozen=True, kw_only=True):
    """The file to write; with `partition_by`, into a folder by the values of columns."""

    path: str | None
    partition_by: Sequence[str] = ()


def _upload(order: UploadOrder) -> None:
    uri = Uri(order.uri)
    if order.path is None:
        _check(uri / SUCCESS if order.partition_by and uri.scheme != "file" else uri, renames=not order.partition_by)
    elif order.partition_by:
        write_partitions(uri, order.path, order.partition_by)
    else:
        _write(uri, order.path)


def _check(uri: Uri, renames: bool) -> None:
    filesystem, inside = filesystem_of(uri)
    if filesystem.type_name in OBJECT_STORES:
        _opened.append(filesystem.open_output_stream(inside, compression=None))
        return
    with _temporary(filesystem, inside) as temporary:
        filesystem.open_output_stream(temporary, compression=None).close()
        if renames:
            try:
                filesystem.move(temporary, f"{temporary}.moved")
            except NotImplementedError:  # an Azure store without folders
                raise Refused(f"the store of {uri} cannot rename a file, and {uri} would appear half written") from None
            filesystem.move(f"{temporary}.moved", temporary)
        filesystem.delete_file(temporary)


def _write(uri: Uri, path: str) -> None:
    filesystem, inside = filesystem_of(uri)
    if filesystem.type_name in OBJECT_STORES:
        _opened.append(filesystem.open_output_stream(inside, compression=None))
        _copy(path, _opened[-1])
        return
    with _temporary(filesystem, inside) as temporary:
        _copy(path, filesystem.open_output_stream(temporary, compression=None))
        filesystem.move(temporary, inside)


@contextlib.contextmanager
def _temporary(filesystem: Any, inside: str) -> Iterator[str]:
    """Yield a temporary path beside a file, in an existing folder; remove it after an error."""
    folder, _, name = inside.rpartition("/")
    filesystem.create_dir(folder, recursive=True)
    temporary = f"{folder}/.{name}.tmp"
    try:
        yield temporary
    except BaseException:
        with contextlib.suppress(OSError):
            filesystem.delete_file(temporary)
        raise


def _copy(path: str, stream: Any) -> None:
    with open_input(path) as file:
        number = 0
        while chunk := file.read(_CHUNK):
            stream.write(chunk)
            number += 1
            if number % _FLUSH_CHUNKS == 0:
                stream.flush()
    stream.close()


if __name__ == "__main__":
    carry_out(msgspec.json.Decoder(UploadOrder), "write", _upload)
