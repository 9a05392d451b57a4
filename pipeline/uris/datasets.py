"""Folders of Parquet files as one table, whose partitions are columns."""

import contextlib
from collections.abc import Iterator
from typing import Any

from pipeline.errors import Refused
from pipeline.uris.opened import OpenSource
from pipeline.uris.stores import failures, filesystem_of, infos_below, stamp_of_files, without_secrets
from pipeline.uris.uri import Uri

_ROWS = 1 << 13
"""At once, all of them in memory."""


@contextlib.contextmanager
def open_dataset(uri: Uri) -> Iterator[OpenSource]:
    """Open all Parquet files of a folder, in the order of their paths, as one of such files. Raise
    `Refused` and `Unfinished`.
    """
    import pyarrow
    from pyarrow import dataset

    try:
        with failures(uri, "read"):
            filesystem, inside = filesystem_of(uri)
            files = infos_below(uri)
            found = dataset.dataset(
                [one.path for one in files],
                filesystem=filesystem,
                format="parquet",
                partitioning=dataset.partitioning(flavor="hive"),
                partition_base_dir=inside,
            )
            schemas = [found.schema, *(part.physical_schema for part in found.get_fragments())]
            table = found.replace_schema(pyarrow.unify_schemas(schemas))
            yield OpenSource(stamp_of_files(files), _as_one_file(table))
    except pyarrow.ArrowException as error:
        raise Refused(f"{uri} is no table of Parquet files: {without_secrets(error, uri)}") from None


def _as_one_file(table: Any) -> Iterator[bytes]:
    import pyarrow
    from pyarrow import parquet

    sink = _Pieces()
    with parquet.ParquetWriter(pyarrow.PythonFile(sink, mode="w"), table.schema) as writer:
        batches = table.to_batches(batch_size=_ROWS, batch_readahead=1, fragment_readahead=1, use_threads=False)
        for batch in batches:
            writer.write_batch(batch)
            yield sink.take()
    yield sink.take()


class _Pieces:
    """A file that gives away what was written to it."""

    closed = False

    def __init__(self) -> None:
        self._data = bytearray()

    def write(self, data: Any) -> int:
        self._data += data
        return len(data)

    def take(self) -> bytes:
        taken, self._data = bytes(self._data), bytearray()
        return taken

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True
