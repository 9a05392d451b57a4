"""Write results to a store; without a path, check alone that they can be written.

A program. The order is read from stdin, and why it failed goes to stderr, as one sentence. It ends
without freeing what it opened, so that an object appears only when all of it was written.
"""

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from jobs.store.storage import StoreError, open_input
from pipeline.errors import CommandEnd, Unfinished, one_line
from pipeline.uris.partitions import write_partitions
from pipeline.uris.stores import OBJECT_STORES, failures, filesystem_of
from pipeline.uris.uri import Uri

_CHUNK = 8 << 20
_FLUSH_CHUNKS = 8
"""After so many all must be stored, which bounds the memory that a slow store takes."""

_opened: list[Any] = []
"""Streams of stores, which publish what they have when they are freed, and so never are."""


class UploadOrder(msgspec.Struct, frozen=True):
    """What the process is started for."""

    uri: str
    path: str | None
    partition_by: Sequence[str] = ()


def main() -> None:
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=UploadOrder)
    uri, code = Uri(order.uri), 0
    try:
        with failures(uri, "write"):
            if order.partition_by and order.path is not None:
                write_partitions(uri, order.path, order.partition_by)
            else:
                _write(uri, order.path)
    except CommandEnd as end:
        code = _say(end)
    except StoreError as error:
        code = _say(Unfinished(str(error)))
    except Exception as error:
        code = _say(Unfinished(f"failed to write {uri}: {one_line(error)}"))
    os._exit(code)


def _say(end: CommandEnd) -> int:
    print(end.message, file=sys.stderr, flush=True)
    return end.exit_code


def _write(uri: Uri, path: str | None) -> None:
    filesystem, inside = filesystem_of(uri)
    if filesystem.type_name in OBJECT_STORES:
        _opened.append(filesystem.open_output_stream(inside, compression=None))
        if path is not None:
            _copy(path, _opened[-1])
        return
    folder, _, name = inside.rpartition("/")
    filesystem.create_dir(folder, recursive=True)
    temporary = f"{folder}/.{name}.tmp"
    try:
        stream = filesystem.open_output_stream(temporary, compression=None)
        if path is not None:
            _copy(path, stream)
            filesystem.move(temporary, inside)
        else:
            stream.close()
            filesystem.delete_file(temporary)
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
    main()
