"""Lines that are no requests, as requests that no worker takes, where they are to have error lines
instead of a whole file being refused.
"""

from collections.abc import Callable, Collection, Mapping

from jobs.batch.input_files import MAX_LINE_BYTES, InputError, read_lines
from jobs.batch.manifest import BatchSpec
from jobs.protocol.endpoints import BATCH_ENDPOINTS
from jobs.protocol.lines import Line, decode_json, encode_body
from jobs.protocol.results import ApiError
from jobs.protocol.validation import LineError, check_line
from jobs.store.storage import AtomicWriter, open_input

_MARK = b'{"invalid_request":'
"""The beginning of such a line, and of no other."""

Served = Mapping[str, Collection[str] | None]


def mark_invalid(spec: BatchSpec, served: Served, source: str, target: str, check: Callable[[], object]) -> str:
    """Write a file of JSONL to `target`, its lines in their places, and return the hash of that;
    calls `check` often. A line without a custom_id stays as it is.

    Raise `InputError`, `StoreError` and what `check` raises.
    """
    stand_in = _stand_in(spec, served)
    with open_input(source) as file, AtomicWriter(target) as writer:
        written = 0
        for line in read_lines(file):
            check()
            if line.raw is None:
                raise InputError(f"line {line.number} of {spec.input} is longer than {MAX_LINE_BYTES} bytes")
            found = check_line(line.raw, line.number, spec.endpoint, served, spec.default_model)
            marked = _marked(line.raw, found, stand_in) if isinstance(found, LineError) else None
            blank = b"\n" * (line.number - 1 - written)
            writer.write(blank + (marked or (b" " if line.raw.startswith(_MARK) else b"") + line.raw))
            written = line.number
        writer.commit()
        return writer.sha256


def problem_of(raw: bytes) -> ApiError | None:
    """Return the answer to a line that was no request; None for the others."""
    if not raw.startswith(_MARK):
        return None
    problem = decode_json(raw)["invalid_request"]
    return ApiError(400, problem["message"], param=problem["param"], code=problem["code"])


def _stand_in(spec: BatchSpec, served: Served) -> dict[str, object]:
    """Return the request of such lines; an empty one where no model is served."""
    for model in sorted(served, key=lambda name: name != spec.default_model):
        for url, endpoint in BATCH_ENDPOINTS.items():
            request: dict[str, object] = {
                "method": "POST",
                "url": url,
                "body": {"model": model, endpoint.prompt_field: {}},
            }
            if isinstance(check_line(encode_body({"custom_id": "a", **request}), 1, spec.endpoint, served), Line):
                return request
    return {}


def _marked(raw: bytes, error: LineError, stand_in: dict[str, object]) -> bytes | None:
    """Return the line with its problem in front; None where that has no custom_id."""
    try:
        line = decode_json(raw)
    except ValueError:
        return None
    if not isinstance(line, dict) or error.param == "custom_id" or not stand_in:
        return None
    line.pop("invalid_request", None)
    problem = {"code": error.code, "message": error.message, "param": error.param}
    return encode_body({"invalid_request": problem, **line, **stand_in}) + b"\n"
