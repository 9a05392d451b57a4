"""Rows of a Parquet or CSV file as the lines of a batch.

A separate program, since a small Parquet file can require any amount of memory, or crash the
reader.

Arguments: location, format, most rows, bytes of memory, seconds of processor time; 0 means no
limit. `RowOptions` or null are read from stdin. The lines go to stdout, an error to stderr.
"""

import base64
import contextlib
import json
import os
import resource
import signal
import sys
from collections.abc import Collection, Iterator
from typing import Any

import msgspec

from jobs.batch.input_files import CSV, PARENT_VARIABLE, TABLE_REFUSED, TABLE_UNREADABLE, InputError
from jobs.batch.row_requests import RowOptions, RowRequests
from jobs.batch.row_values import json_rows, kept_schema, no_text, python_rows
from jobs.batch.tables import OpenTable, open_table
from jobs.errors import JobsError
from jobs.process import buffer_stdout, die_with_parent, limit_resource
from jobs.protocol import fields
from jobs.protocol.chat import CHAT
from jobs.protocol.completions import COMPLETIONS
from jobs.protocol.endpoint import BatchEndpoint
from jobs.protocol.endpoints import BATCH_ENDPOINTS, BATCH_URLS, ENDPOINTS
from jobs.protocol.lines import decode_json
from jobs.protocol.parameters import JSON_COLUMNS
from jobs.store.storage import StoreError

_decode = msgspec.json.Decoder(RowOptions | None).decode

_SHOWN_COLUMNS = 20
_SHOWN_CHARACTERS = 1000
_TEXT_COLUMNS = tuple(dict.fromkeys(names for endpoint in BATCH_ENDPOINTS.values() for names in endpoint.text_names))
"""The columns that together make a line, for the first endpoint that has them."""
_PARSED_COLUMNS = (*JSON_COLUMNS, ENDPOINTS[CHAT].prompt_field)
_BODY_COLUMNS = {*_PARSED_COLUMNS, *(name for endpoint in BATCH_ENDPOINTS.values() for name in endpoint.file_columns)}
"""Columns whose cells are JSON in CSV, where numbers are text."""
_LINE_COLUMNS = ("custom_id", "method", "url", "body", "model", "user")
_COLUMNS = dict.fromkeys(
    (
        *_LINE_COLUMNS,
        *(name for names in _TEXT_COLUMNS for name in names),
        *(name for endpoint in BATCH_ENDPOINTS.values() for name in endpoint.file_columns),
    )
)


def main() -> None:
    """Write the lines; exit with `TABLE_REFUSED` for a bad file, `TABLE_UNREADABLE` for a read
    error.
    """
    location, kind, (most_rows, memory, seconds) = *sys.argv[1:3], map(int, sys.argv[3:])
    if parent := os.environ.get(PARENT_VARIABLE):
        die_with_parent(int(parent))  # not as `preexec_fn`, which may block forever if the parent has threads
    for number in (signal.SIGINT, signal.SIGTERM):  # the reader of the lines decides when this ends
        signal.signal(number, signal.SIG_IGN)
    buffer_stdout()
    _limit(memory, seconds)
    try:
        options = _decode(sys.stdin.buffer.read())
        for count, line in enumerate(_lines(location, kind, options)):
            if most_rows and count == most_rows:
                break
            sys.stdout.buffer.write(_encoded(line))
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        os._exit(0)
    except InputError as error:
        _fail(str(error), TABLE_REFUSED)
    except StoreError as error:
        _fail(str(error), TABLE_UNREADABLE)
    except MemoryError:
        pass  # the objects that hold the memory are released
    else:
        os._exit(0)
    _fail(
        f"{location} needs more than {memory >> 20} MiB of memory to be read: write it with smaller pages",
        TABLE_REFUSED,
    )


def _limit(memory: int, seconds: int) -> None:
    if memory:
        limit_resource(resource.RLIMIT_DATA, memory)
    if seconds:
        limit_resource(resource.RLIMIT_CPU, seconds)
    limit_resource(resource.RLIMIT_CORE, 0)


def _fail(why: str, code: int) -> None:
    sys.stderr.buffer.write(why[:_SHOWN_CHARACTERS].encode(errors="surrogateescape"))
    sys.stderr.buffer.flush()
    os._exit(code)


def _lines(location: str, kind: str, options: RowOptions | None) -> Iterator[dict[str, Any]]:
    import pyarrow

    try:
        table = open_table(location, kind)
        yield from _lines_by_columns(location, kind, table) if options is None else _requests(location, table, options)
    except MemoryError:  # Arrow's own error is both
        raise
    except UnicodeDecodeError:
        raise InputError(f"{location} has a column whose name is not UTF-8 text: rename it") from None
    except (pyarrow.ArrowException, OSError) as error:
        # Arrow's errors for damaged pages have no errno.
        if isinstance(error, OSError) and error.errno is not None:
            raise StoreError(f"cannot read {location}: {error.strerror}") from error
        what = "CSV" if kind == CSV else "Parquet"
        raise InputError(f"{location} is not a readable {what} file: {' '.join(str(error).split())}") from error


def _requests(location: str, table: OpenTable, options: RowOptions) -> Iterator[dict[str, Any]]:
    """Yield requests built from the rows by `options`."""
    names = table.schema.names
    requests = RowRequests(options, names)
    if missing := [name for name in requests.columns if name not in names]:
        raise InputError(f"{location} has no column {fields.shown(missing[0])}; it has: {_shown(names)}")
    _check_single(location, table, requests.columns)
    first = {}
    if options.keep_columns:
        schema = kept_schema(location, table.schema, options.keep_columns)
        first = {"schema": base64.b64encode(schema.serialize()).decode()}
    number = 0
    for rows in table.read(requests.columns):
        for row in json_rows(location, rows, requests.columns, options.keep_columns, number):
            number += 1
            yield requests.line(number, row) | (first if number == 1 else {})


def _lines_by_columns(location: str, kind: str, table: OpenTable) -> Iterator[dict[str, Any]]:
    """Yield the rows as requests: columns are members of a line, or of its body."""
    names = table.schema.names
    if "custom_id" not in names or not any(set(needed) <= set(names) for needed in (("body",), *_TEXT_COLUMNS)):
        either = ", ".join(" with ".join(needed) for needed in (("body",), *_TEXT_COLUMNS))
        raise InputError(f"{location} needs a column custom_id, and one of {either}; it has: {_shown(sorted(names))}")
    parsed = _BODY_COLUMNS if kind == CSV else _PARSED_COLUMNS
    columns = [name for name in _COLUMNS if name in names]
    _check_single(location, table, columns)
    number = 0
    for rows in table.read(columns):
        for row in python_rows(location, rows, columns, number):
            number += 1
            try:
                line = _line_of(row, parsed)
            except _BadColumn as error:
                raise no_text(location, str(error), number) from error
            yield line


def _check_single(location: str, table: OpenTable, columns: Collection[str]) -> None:
    names = table.schema.names
    if twice := next((name for name in columns if names.count(name) > 1), None):
        raise InputError(f"{location} has several columns {fields.shown(twice)}: leave one")


def _shown(names: list[str]) -> str:
    return ", ".join(fields.shown(name) for name in names[:_SHOWN_COLUMNS])


def _line_of(row: dict[str, Any], parsed: Collection[str]) -> dict[str, Any]:
    """Return OpenAI's line for one row; missing values stay absent, so that validation names them.

    Cells of `parsed` columns may be JSON text.
    """
    row = {
        name: _plain(value, name) for name, value in row.items() if value is not None and value == value
    }  # NaN: pandas' null
    endpoint, names = _endpoint_of(row)
    body = _parsed(row["body"]) if "body" in row else _body_of(row, (*endpoint.file_columns, *names), parsed)
    line: dict[str, Any] = {"method": row.get("method", "POST"), "body": body}
    if "custom_id" in row:
        line["custom_id"] = str(row["custom_id"])
    if "url" in row:
        line["url"] = row["url"]
    elif isinstance(body, dict):
        line["url"] = _endpoint_of(body)[0].url
    return line


def _endpoint_of(values: dict[str, Any]) -> tuple[BatchEndpoint, tuple[str, ...]]:
    """Return the endpoint of a row or a body, and its text members.

    It is that of the `url` if there is one, else the first one whose texts are present.
    """
    named = BATCH_ENDPOINTS.get(BATCH_URLS.get(str(values.get("url")), ""))
    for endpoint in (*([named] if named else ()), *BATCH_ENDPOINTS.values()):
        for names in endpoint.text_names:
            if all(name in values for name in names):
                return endpoint, names
    return named or ENDPOINTS[COMPLETIONS], ()


def _body_of(row: dict[str, Any], members: tuple[str, ...], parsed: Collection[str]) -> dict[str, Any]:
    names = ("model", *members, "user")
    return {name: _parsed(row[name]) if name in parsed else row[name] for name in names if name in row}


def _parsed(value: Any) -> Any:
    """Return the value of a cell that holds JSON text or a nested value."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return decode_json(value.encode())
    return value


class _BadColumn(JobsError):
    """A cell is not text; the error names its column."""


def _plain(value: Any, column: str) -> Any:
    """Return a cell as a JSON value: bytes as text, and structs without missing fields.

    Raise `_BadColumn`.
    """
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise _BadColumn(column) from error
    if isinstance(value, dict):
        return {name: _plain(item, column) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_plain(item, column) for item in value]
    return value


def _encoded(line: dict[str, Any]) -> bytes:
    """Encode a line; validation checks the values."""
    return json.dumps(line, separators=(",", ":"), default=str).encode() + b"\n"


if __name__ == "__main__":
    main()
