"""Parquet and CSV files as batches of rows, read without threads and in small pieces."""

import csv
import io
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from jobs.batch.csv_quotes import QuoteCheck, check_quotes
from jobs.batch.input_files import CSV, InputError, open_text, open_unpacked
from jobs.protocol.lines import decode_json
from jobs.store.input_formats import JSONL, PARQUET
from jobs.store.storage import open_input

if TYPE_CHECKING:
    import pyarrow

MOST_ROWS = 64
"""Rows in memory at once."""
CSV_BLOCK_BYTES = 4 << 20
"""Most bytes of a row of CSV. Arrow holds up to 32 blocks of this size, also without threads."""

_READ_BYTES = 1 << 20


class OpenTable(NamedTuple):
    """The columns of a table, and a reader for some of them."""

    schema: "pyarrow.Schema"
    read: Callable[[Sequence[str]], Iterator["pyarrow.RecordBatch"]]


def open_table(location: str, kind: str) -> OpenTable:
    """Open a table. Raise `InputError`, `StoreError`, OSError and what pyarrow raises."""
    return _open_parquet(location) if kind == PARQUET else _open_csv(location)


def _open_parquet(location: str) -> OpenTable:
    import pyarrow
    from pyarrow import parquet

    table = parquet.ParquetFile(pyarrow.PythonFile(open_input(location), mode="r"), buffer_size=_READ_BYTES)

    def read(columns: Sequence[str]) -> Iterator["pyarrow.RecordBatch"]:
        yield from table.iter_batches(batch_size=MOST_ROWS, columns=list(columns), use_threads=False)

    return OpenTable(table.schema_arrow, read)


def _open_csv(location: str) -> OpenTable:
    """Open a CSV file; every cell is text, or null if it is empty and unquoted."""
    import pyarrow

    schema = pyarrow.schema([(name, pyarrow.string()) for name in _csv_header(location)])
    return OpenTable(schema, partial(_csv_batches, location))


def _csv_batches(location: str, columns: Sequence[str]) -> Iterator["pyarrow.RecordBatch"]:
    import pyarrow
    from pyarrow import csv as arrow_csv

    read = arrow_csv.ReadOptions(use_threads=False, block_size=CSV_BLOCK_BYTES)
    parse = arrow_csv.ParseOptions(newlines_in_values=True)
    convert = arrow_csv.ConvertOptions(
        include_columns=list(columns),
        column_types=dict.fromkeys(columns, pyarrow.string()),
        strings_can_be_null=True,
        quoted_strings_can_be_null=False,
        null_values=[""],
    )
    quotes = QuoteCheck(location)
    try:
        file = _NotedReads(open_unpacked(location), quotes.add)
        with arrow_csv.open_csv(file, read, parse, convert) as reader:
            for rows in reader:
                for start in range(0, rows.num_rows, MOST_ROWS):
                    yield rows.slice(start, MOST_ROWS)
    except pyarrow.ArrowInvalid as error:
        check_quotes(location)
        if "straddl" in str(error):
            raise InputError(f"{location} has a row of more than {CSV_BLOCK_BYTES >> 20} MiB") from error
        raise
    quotes.end()


class _NotedReads(io.RawIOBase):
    """A file that passes each piece read to `note`."""

    def __init__(self, file: BinaryIO, note: Callable[[bytes], object]) -> None:
        self._file = file
        self._note = note

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._note(data)
        return data

    def close(self) -> None:
        self._file.close()
        super().close()


def _csv_header(location: str) -> list[str]:
    try:
        with open_text(location) as lines:
            first = next((line for line in lines if line.strip("\r\n")), "")
            if _is_json(first):
                suffix = location[location.lower().rindex(CSV) :].lower().replace(CSV, JSONL)
                raise InputError(f"{location} holds JSONL, not CSV: give it a name that ends with {suffix}")
            header = next(filter(None, csv.reader(itertools.chain([first], lines))), None)
    except UnicodeDecodeError as error:
        raise InputError(f"{location} is not CSV in UTF-8: {error}") from error
    except csv.Error as error:
        check_quotes(location)
        raise InputError(f"{location} is not CSV in UTF-8: {error}") from error
    if header is None:
        raise InputError(f"{location} is empty: the first row of CSV names the columns")
    if any("\n" in name for name in header):
        check_quotes(location)
    return header


def _is_json(line: str) -> bool:
    try:
        return line.lstrip().startswith("{") and isinstance(decode_json(line.encode()), dict)
    except ValueError:
        return False
