"""The results of a batch as a Parquet file."""

from functools import partial
from typing import Any, Literal

import msgspec

from jobs.batch.manifest import Manifest
from jobs.batch.result_files import open_output
from jobs.control.line_answer import LineAnswer
from jobs.control.number_columns import NumberColumns
from jobs.protocol.results import batch_request_id
from jobs.store.storage import AtomicWriter

_ROWS = 2048
_ROWS_BYTES = 1 << 26


class _Choice(msgspec.Struct):
    text: str | None = None
    message: dict[str, Any] | None = None
    finish_reason: str | None = None


class _Error(msgspec.Struct):
    message: str | None = None
    code: str | None = None
    type: str | None = None


class _Body(msgspec.Struct):
    model: str | None = None
    choices: list[_Choice] = []
    error: _Error | None = None


class ParquetWriter:
    """One row per line, with typed columns; `response` holds the body as JSON, `text` what the
    model said. Where `embedding` or `score` holds the answer, `response` is null.
    """

    def __init__(self, manifest: Manifest, location: str, numbers: NumberColumns) -> None:
        self._batch_id = manifest.batch_id
        self._open = partial(open_output, manifest, location)
        self._numbers = numbers
        self._rows: list[dict[str, Any]] = []
        self._size = 0
        self._file: AtomicWriter | None = None
        self._decoder = msgspec.json.Decoder(_Body)

    def add(self, answer: LineAnswer) -> None:
        self._rows.append(self._row(answer))
        self._size += len(answer.custom_id) + (0 if answer.result is None else len(answer.result.body))
        if len(self._rows) >= _ROWS or self._size >= _ROWS_BYTES:
            self._flush()

    def commit(self) -> None:
        file = self._flush()
        self._parquet.close()
        file.commit()

    def _row(self, answer: LineAnswer) -> dict[str, Any]:
        row: dict[str, Any] = {"custom_id": answer.custom_id, "id": batch_request_id(self._batch_id, answer.line)}
        result = answer.result
        if result is None:
            code, message = answer.reason
            return row | {"error_code": code, "error_message": message}
        body = self._decoder.decode(result.body)
        row |= {
            "status_code": result.status,
            "request_id": result.request_id,
            "response": result.body.decode(),
            "model": body.model,
        }
        row |= {"prompt_tokens": result.usage.prompt_tokens, "completion_tokens": result.usage.completion_tokens}
        row |= {"cached_tokens": result.usage.cached_tokens}
        if body.choices:
            choice = body.choices[0]
            row |= {"text": (choice.message or {}).get("content", choice.text), "finish_reason": choice.finish_reason}
        if body.error is not None:
            row |= {"error_code": body.error.code or body.error.type, "error_message": body.error.message}
        if result.succeeded and (cells := self._numbers.cells(result.body)):
            row |= {"response": None, **cells}
        return row

    def _flush(self) -> AtomicWriter:
        import pyarrow
        from pyarrow import parquet

        if self._file is None:
            self._file, self._schema = self._open(), _parquet_schema(self._numbers)
            self._sink = pyarrow.PythonFile(_Sink(self._file), mode="w")
            repeated = [name for name in self._schema.names if name != "embedding"]
            self._parquet = parquet.ParquetWriter(self._sink, self._schema, compression="zstd", use_dictionary=repeated)
        if self._rows:
            columns = [self._column(field) for field in self._schema]
            self._parquet.write_table(pyarrow.Table.from_arrays(columns, schema=self._schema))
        self._rows, self._size = [], 0
        return self._file

    def _column(self, field: Any) -> Any:
        """One column of the rows, as Arrow's array."""
        import pyarrow

        values = [row.get(field.name) for row in self._rows]
        if field.name != "embedding":
            return pyarrow.array(values, field.type)
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


class _Sink:
    """The face of a file that pyarrow writes to; closing it leaves the file to its
    `AtomicWriter`.
    """

    closed = False

    def __init__(self, writer: AtomicWriter) -> None:
        self._writer = writer

    def write(self, data: Any) -> int:
        return self._writer.write(bytes(data))

    def tell(self) -> int:
        return self._writer.bytes

    def writable(self) -> bool:
        return True

    def flush(self) -> None:
        return

    def close(self) -> None:
        self.closed = True


def _parquet_schema(numbers: NumberColumns) -> Any:
    import pyarrow

    text = ("custom_id", "id")
    optional = ("model", "text", "finish_reason", "error_code", "error_message", "request_id", "response")
    embedding = pyarrow.list_(pyarrow.type_for_alias(numbers.embedding_dtype), numbers.embedding_size)
    counts = ("prompt_tokens", "completion_tokens", "cached_tokens")
    return pyarrow.schema(
        [pyarrow.field(name, pyarrow.string(), nullable=False) for name in text]
        + [pyarrow.field("status_code", pyarrow.int32())]
        + [pyarrow.field(name, pyarrow.string()) for name in optional]
        + [pyarrow.field(name, pyarrow.int64()) for name in counts]
        + ([pyarrow.field("embedding", embedding)] if numbers.embedding_size else [])
        + ([pyarrow.field("score", pyarrow.float32())] if numbers.with_scores else [])
    )
