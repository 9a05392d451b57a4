"""Placeholders for invalid lines.

A placeholder is a request that every worker refuses, so that each invalid line ends with an error
line of its own.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from jobs.batch.input_files import MAX_LINE_BYTES, InputError, InputLine, read_lines
from jobs.batch.manifest import BatchSpec
from jobs.batch.source_check import check_of, too_long
from jobs.protocol.endpoints import BATCH_ENDPOINTS
from jobs.protocol.lines import Line, decode_json, encode_body
from jobs.protocol.results import ApiError
from jobs.protocol.validation import LineError
from jobs.store.storage import AtomicWriter, open_input

_MARK = b'{"invalid_request":'
"""The prefix of placeholders, and of no other lines."""

Served = Mapping[str, Collection[str] | None]


def mark_invalid(
    spec: BatchSpec,
    served: Served,
    source: str,
    target: str,
    check: Callable[[], object],
    take: Callable[[InputLine, Line | LineError], object],
) -> str:
    """Write the JSONL of `source` to `target` with placeholders, and return the hash of that.

    Each invalid line with a custom_id gets a placeholder. Calls `check` often, and `take` with each
    line of `target` and the result of its check.

    A placeholder has the model and the url of the first valid line, so that it needs no additional
    worker. If no line is valid, all stay unchanged.

    Raise `InputError`, `StoreError` and what `check` raises.
    """
    placeholder = _placeholder(spec, served, source, check)
    with AtomicWriter(target, unchanging=True) as writer:
        written = 0
        for line, found in _checked(spec, served, source, check):
            raw = unmarked_line(line.raw or b"")
            if isinstance(found, LineError) and placeholder and (marked := marked_line(raw, found, placeholder)):
                raw, found = marked, check_of(spec, line._replace(raw=marked), served)
            blank = b"\n" * (line.number - 1 - written)
            place = InputLine(line.number, writer.bytes + len(blank), raw)
            take(place, found if len(raw) <= MAX_LINE_BYTES else too_long(spec, line.number))
            writer.write(blank + raw)
            written = line.number
        writer.commit()
        return writer.sha256


def placeholder_for(url: str, model: str) -> dict[str, Any]:
    """Return the members of placeholders except their ids, for workers of a model ("": any)."""
    named = {"model": model} if model else {}
    return {"method": "POST", "url": url, "body": {**named, BATCH_ENDPOINTS[url].prompt_field: {}}}


def marked_line(raw: bytes, error: LineError, placeholder: dict[str, Any]) -> bytes | None:
    """Return the line with its problem as a prefix; None if it has no custom_id."""
    try:
        line = decode_json(raw)
    except ValueError:
        return None
    if not isinstance(line, dict) or error.param == "custom_id":
        return None
    line.pop("invalid_request", None)
    problem = {"code": error.code, "message": error.message, "param": error.param}
    return encode_body({"invalid_request": problem, **line, **placeholder}) + b"\n"


def unmarked_line(raw: bytes) -> bytes:
    """Return a valid line that cannot be taken for a placeholder."""
    return (b" " if raw.startswith(_MARK) else b"") + raw


def is_placeholder(raw: bytes) -> bool:
    """Return whether a line is a placeholder for an invalid one."""
    return raw.startswith(_MARK)


def problem_of(raw: bytes) -> ApiError | None:
    """Return the answer to a placeholder; None for other lines."""
    if not is_placeholder(raw):
        return None
    problem = decode_json(raw)["invalid_request"]
    return ApiError(400, problem["message"], param=problem["param"], code=problem["code"])


def _placeholder(spec: BatchSpec, served: Served, source: str, check: Callable[[], object]) -> dict[str, Any] | None:
    """Return the members of placeholders except their ids; None if no line is valid."""
    lines = _checked(spec, served, source, check)
    valid = next((found for _, found in lines if isinstance(found, Line)), None)
    if valid is None:
        return None
    return placeholder_for(valid.url, valid.model)


def _checked(
    spec: BatchSpec, served: Served, source: str, check: Callable[[], object]
) -> Iterator[tuple[InputLine, Line | LineError]]:
    """Yield each line with the result of its check."""
    with open_input(source) as file:
        for line in read_lines(file):
            check()
            if line.raw is None:
                raise InputError(f"line {line.number} of {spec.input} is longer than {MAX_LINE_BYTES} bytes")
            yield line, check_of(spec, line, served)
