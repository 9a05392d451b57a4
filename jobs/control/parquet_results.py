"""The results of a batch as a Parquet file."""

import base64
from functools import partial
from typing import Any, Literal

from jobs.batch.manifest import Manifest
from jobs.batch.result_files import open_uncompressed
from jobs.batch.row_requests import read_extras
from jobs.batch.row_values import as_array
from jobs.batch.source import open_source
from jobs.control.line_answer import LineAnswer
from jobs.control.number_columns import NumberColumns
from jobs.control.result_rows import COUNT_COLUMNS, TEXT_COLUMNS, kept_name, result_row
from jobs.store.compression import ArrowSink
from jobs.store.storage import AtomicWriter

_ROWS = 2048
_ROWS_BYTES = 1 << 26


class ParquetWriter:
    """Writes one row per line, with typed columns.

    `response` has the body as JSON, `text` the model's text. If `embedding` or `score` has the
    answer, `response` is null.
    """

    def __init__(self, manifest: Manifest, location: str, numbers: NumberColumns) -> None:
        self._batch_id = manifest.batch_id
        self._open = partial(open_uncompressed, manifest, location)
        self._kept = partial(_kept_columns, manifest)
        self._numbers = numbers
        self._rows: list[dict[str, Any]] = []
        self._size = 0
        self._file: AtomicWriter | None = None

    def add(self, answer: LineAnswer) -> None:
        self._rows.append(self._row(answer))
        self._size += answer.bytes
        if len(self._rows) >= _ROWS or self._size >= _ROWS_BYTES:
            self._flush()

    def commit(self) -> None:
        file = self._flush()
        self._parquet.close()
        file.commit()

    def _row(self, answer: LineAnswer) -> dict[str, Any]:
        row, result = result_row(self._batch_id, answer), answer.result
        if result is not None and result.succeeded and (cells := self._numbers.cells(result.body)):
            row |= {"response": None, **cells}
        return row

    def _flush(self) -> AtomicWriter:
        import pyarrow
        from pyarrow import parquet

        if self._file is None:
            self._file, self._schema = self._open(), _parquet_schema(self._numbers, self._kept())
            self._sink = pyarrow.PythonFile(ArrowSink(self._file), mode="w")
            repeated = [name for name in self._schema.names if name != "embedding"]
            self._parquet = parquet.ParquetWriter(self._sink, self._schema, compression="zstd", use_dictionary=repeated)
        if self._rows:
            columns = [self._column(field) for field in self._schema]
            self._parquet.write_table(pyarrow.Table.from_arrays(columns, schema=self._schema))
        self._rows, self._size = [], 0
        return self._file

    def _column(self, field: Any) -> Any:
        """Return one column of the rows as Arrow's array."""
        import pyarrow

        values = [row.get(field.name) for row in self._rows]
        if field.name != "embedding":
            return as_array(values, field.type)
        size = self._numbers.embedding_size
        filled = b"".join(value or bytes(field.type.value_type.byte_width * size) for value in values)
        numbers = pyarrow.Array.from_buffers(
            field.type.value_type, len(values) * size, [None, pyarrow.py_buffer(filled)]
        )
        missing = pyarrow.array([value is None for value in values])
        return pyarrow.FixedSizeListArray.from_arrays(numbers, type=field.type, mask=missing)

    def __enter__(self) -> "ParquetWriter":
        return self

    def __exit__(self, *error: object) -> Literal[False]:
        if self._file is not None:
            self._file.close()
        return False


def _parquet_schema(numbers: NumberColumns, kept: Any) -> Any:
    import pyarrow

    embedding = pyarrow.list_(pyarrow.type_for_alias(numbers.embedding_dtype), numbers.embedding_size)
    return pyarrow.schema(
        [pyarrow.field(name, pyarrow.string(), nullable=False) for name in ("custom_id", "id")]
        + [pyarrow.field("status_code", pyarrow.int32())]
        + [pyarrow.field(name, pyarrow.string()) for name in TEXT_COLUMNS]
        + [pyarrow.field(name, pyarrow.int64()) for name in COUNT_COLUMNS]
        + ([pyarrow.field("embedding", embedding)] if numbers.embedding_size else [])
        + ([pyarrow.field("score", pyarrow.float32())] if numbers.with_scores else [])
        + [field.with_name(kept_name(field.name)) for field in kept]
    )


def _kept_columns(manifest: Manifest) -> Any:
    """Return the schema of the input's columns in the rows. Raise `StoreError`."""
    import pyarrow

    if manifest.spec.rows is None or not manifest.spec.rows.keep_columns:
        return ()
    with open_source(manifest) as file:
        schema = read_extras(file.readline()).schema
    return pyarrow.ipc.read_schema(pyarrow.py_buffer(base64.b64decode(schema))) if schema else ()
