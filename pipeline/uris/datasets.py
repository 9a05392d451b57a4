"""Folders of Parquet files as one table; partitions become columns."""

import contextlib
from collections.abc import Iterator
from typing import Any

from jobs.batch.tables import MOST_ROWS
from pipeline.errors import Refused
from pipeline.uris.opened import GROUP_ROWS, OpenSource
from pipeline.uris.stores import failures, filesystem_of, infos_below, stamp_of_files, without_secrets
from pipeline.uris.uri import Uri

_GROUP_BYTES = 64 << 20
_READ_BYTES = 1 << 20


@contextlib.contextmanager
def open_dataset(uri: Uri) -> Iterator[OpenSource]:
    """Open all Parquet files of a folder, in the order of their paths, as one Parquet file.

    Raise `Refused` and `Unfinished`.
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
            fragments = list(found.get_fragments())
            schema = pyarrow.unify_schemas([found.schema, *(part.physical_schema for part in fragments)])
            yield OpenSource(stamp_of_files(files), _as_one_file(fragments, schema))
    except pyarrow.ArrowException as error:
        if isinstance(error, MemoryError):
            raise
        raise Refused(f"{uri} is not a table of Parquet files: {without_secrets(error, uri)}") from None


def _as_one_file(fragments: list[Any], schema: Any) -> Iterator[bytes]:
    import pyarrow
    from pyarrow import parquet

    sink = _Sink()
    with parquet.ParquetWriter(pyarrow.PythonFile(sink, mode="w"), schema) as writer:
        for group in _groups(batch for fragment in fragments for batch in _batches(fragment, schema)):
            writer.write_table(pyarrow.Table.from_batches(group))
            yield sink.take()
    yield sink.take()


def _batches(fragment: Any, schema: Any) -> Iterator[Any]:
    """Yield the rows of a file in small batches; a `Scanner` would read more at once."""
    import pyarrow
    from pyarrow import dataset, parquet

    partition = dataset.get_partition_keys(fragment.partition_expression)

    def column(rows: Any, field: Any) -> Any:
        if field.name in partition:
            return pyarrow.repeat(pyarrow.scalar(partition[field.name], field.type), len(rows))
        if field.name not in rows.schema.names:
            return pyarrow.nulls(len(rows), field.type)
        return rows.column(field.name).cast(field.type)

    with fragment.open() as file:
        for rows in parquet.ParquetFile(file, buffer_size=_READ_BYTES).iter_batches(MOST_ROWS, use_threads=False):
            yield pyarrow.record_batch([column(rows, field) for field in schema], schema=schema)


def _groups(batches: Iterator[Any]) -> Iterator[list[Any]]:
    """Yield groups of batches with the size of a row group."""
    group, rows, size = [], 0, 0
    for batch in batches:
        group.append(batch)
        rows, size = rows + len(batch), size + batch.nbytes
        if rows >= GROUP_ROWS or size >= _GROUP_BYTES:
            yield group
            group, rows, size = [], 0, 0
    if group:
        yield group


class _Sink:
    """A file in memory; its content is read out while it is written."""

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
