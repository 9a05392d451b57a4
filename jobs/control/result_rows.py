"""The results of a batch as rows of a table, and the names of the columns."""

from collections.abc import Sequence
from typing import Any

import msgspec

from jobs.control.line_answer import LineAnswer
from jobs.protocol.results import batch_request_id

TEXT_COLUMNS = ("model", "text", "finish_reason", "error_code", "error_message", "request_id", "response")
COUNT_COLUMNS = ("prompt_tokens", "completion_tokens", "cached_tokens")
RESULT_COLUMNS = ("custom_id", "id", "status_code", *TEXT_COLUMNS, *COUNT_COLUMNS)
NUMBER_COLUMNS = ("embedding", "score")

_KEPT_PREFIX = "input_"


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


def kept_name(name: str) -> str:
    """Return the name of an input's column beside those of the results."""
    return f"{_KEPT_PREFIX}{name}" if name in RESULT_COLUMNS or name in NUMBER_COLUMNS else name


def result_row(batch_id: str, answer: LineAnswer) -> dict[str, Any]:
    """Return the row of a line, without null cells and the columns of numbers."""
    row = {kept_name(name): value for name, value in answer.columns.items()}
    row |= {"custom_id": answer.custom_id, "id": batch_request_id(batch_id, answer.line)}
    result = answer.result
    if result is None:
        code, message = answer.reason
        return row | {"error_code": code, "error_message": message}
    body = _decode(result.body)
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
    return row


def repeated_name(kept: Sequence[str]) -> str | None:
    """Return a name that two columns of the results would share, or None."""
    names = [kept_name(name) for name in kept]
    return next((name for name in names if names.count(name) > 1), None)


_decode = msgspec.json.Decoder(_Body).decode
