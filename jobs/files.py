"""Input files as lines: JSONL is read where it stands; compressed JSONL and Parquet are first written out as JSONL in the batch's root."""

import contextlib
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple

from jobs.lines import decode_json
from jobs.storage import AtomicWriter, open_input

MAX_LINE_BYTES = 64 * 1024 * 1024
SPOOL_NAME = "lines.jsonl"

_COPY_CHUNK = 1 << 20
_ROWS = 512
_PARQUET_SUFFIXES = (".parquet", ".pq")
_BOM = b"\xef\xbb\xbf"
_LINE_COLUMNS = ("custom_id", "method", "url", "body", "prompt", "messages")
_BODY_COLUMNS = (
    "model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids", "ignore_eos",
    "n", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_p", "min_tokens", "logprobs", "top_logprobs",
    "prompt_logprobs", "echo", "logit_bias", "bad_words", "skip_special_tokens", "priority", "truncate_prompt_tokens", "response_format",
    "user",
)  # fmt: skip


class InputError(Exception):
    """The file as a whole cannot be read; the text is one sentence."""


class InputLine(NamedTuple):
    """One line that is not blank. `number` counts all lines from 1; `raw` is None if the line exceeds `MAX_LINE_BYTES`."""

    number: int
    offset: int
    raw: bytes | None


def is_parquet(location: str) -> bool:
    """Whether a file's name says Parquet."""
    return location.lower().endswith(_PARQUET_SUFFIXES)


def needs_spool(location: str) -> bool:
    """Whether lines of the file cannot be read at an offset."""
    return location.lower().endswith((*_PARQUET_SUFFIXES, ".gz", ".zst"))


def read_lines(file: BinaryIO, note: Callable[[bytes], object] = len) -> Iterator[InputLine]:
    """Every line that is not blank, in order, holding one at a time; a byte order mark at the start is passed over.

    `note` is handed every byte of the file, which a hash of it is made from.
    """
    number, offset = 0, 0
    if file.read(len(_BOM)) == _BOM:
        offset = len(_BOM)
        note(_BOM)
    file.seek(offset)
    while raw := file.readline(MAX_LINE_BYTES + 1):
        note(raw)
        number += 1
        length = len(raw)
        if length > MAX_LINE_BYTES:
            yield InputLine(number, offset, None)
            while not raw.endswith(b"\n") and (raw := file.readline(MAX_LINE_BYTES)):
                note(raw)
                length += len(raw)
        elif not raw.isspace():
            yield InputLine(number, offset, raw)
        offset += length


def write_spool(location: str, spool: str) -> str:
    """Writes the lines of a Parquet or compressed file as JSONL, in bounded memory, and returns the hash of that.

    Raises `InputError` and `StoreError`.
    """
    with open_input(location) as file, AtomicWriter(spool) as writer:
        for chunk in _as_jsonl(location, file):
            writer.write(chunk)
        writer.commit()
        return writer.sha256


def first_line(location: str) -> bytes | None:
    """The first line that is not blank, of a file of any kind, as JSONL; None if there is none, or none of a size that is read.

    Raises `InputError` and `StoreError`.
    """
    begun = b""
    with open_input(location) as file:
        for chunk in _as_jsonl(location, file):
            begun = (begun + chunk).removeprefix(_BOM).lstrip()
            line, newline, _ = begun.partition(b"\n")
            if newline or len(begun) > MAX_LINE_BYTES:
                return line if newline else None
    return begun or None


def _as_jsonl(location: str, file: BinaryIO) -> Iterator[bytes]:
    """The file's lines in chunks of any size. Raises `InputError`."""
    if is_parquet(location):
        return _parquet_lines(location, file)
    if needs_spool(location):
        return _decompressed(location, file)
    return iter(lambda: file.read(_COPY_CHUNK), b"")


def _decompressed(location: str, file: BinaryIO) -> Iterator[bytes]:
    try:
        if location.lower().endswith(".gz"):
            reader: Any = gzip.GzipFile(fileobj=file)
        else:
            import pyarrow

            reader = pyarrow.CompressedInputStream(pyarrow.PythonFile(file, mode="r"), "zstd")
        while chunk := reader.read(_COPY_CHUNK):
            yield chunk
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{location} cannot be decompressed: {error}") from error


def _parquet_lines(location: str, file: BinaryIO) -> Iterator[bytes]:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.ParquetFile(pyarrow.PythonFile(file, mode="r"))
        names = set(table.schema_arrow.names)
        if "custom_id" not in names or not names & {"body", "prompt", "messages"}:
            found = ", ".join(sorted(names))
            raise InputError(f"{location} needs a column custom_id, and one of body, prompt and messages; it has: {found}")
        columns = [name for name in (*_LINE_COLUMNS, *_BODY_COLUMNS) if name in names]
        for rows in table.iter_batches(batch_size=_ROWS, columns=columns):
            yield b"".join(_encoded(_line_of(row)) for row in rows.to_pylist())
    except _BadColumn as error:
        raise InputError(f"{location} has a column {error} that holds bytes which are not UTF-8 text") from error
    except pyarrow.ArrowException as error:
        raise InputError(f"{location} is not a readable Parquet file: {error}") from error


def _line_of(row: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's line for one row; what the row lacks stays absent, so that validation names it."""
    row = {name: _plain(value, name) for name, value in row.items() if value is not None and value == value}  # NaN: pandas' null
    body = _parsed(row["body"]) if "body" in row else _body_of(row)
    line: dict[str, Any] = {"method": row.get("method", "POST"), "body": body}
    if "custom_id" in row:
        line["custom_id"] = str(row["custom_id"])
    if "url" in row:
        line["url"] = row["url"]
    elif isinstance(body, dict):
        line["url"] = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return line


def _body_of(row: dict[str, Any]) -> dict[str, Any]:
    body = {name: row[name] for name in _BODY_COLUMNS if name in row}
    if "messages" in row:
        body["messages"] = _parsed(row["messages"])
    elif "prompt" in row:
        body["prompt"] = row["prompt"]
    return body


def _parsed(value: Any) -> Any:
    """A cell that holds JSON text or a nested value."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return decode_json(value.encode())
    return value


class _BadColumn(Exception):
    """A cell is no text; names its column."""


def _plain(value: Any, column: str) -> Any:
    """A cell as JSON knows it: bytes as text, and structs without the fields that a row lacks. Raises `_BadColumn`."""
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
    """With whatever values the body holds, for validation to judge."""
    return json.dumps(line, separators=(",", ":"), default=str).encode() + b"\n"
