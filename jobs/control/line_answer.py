"""The outcome of a line of a finished batch."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jobs.protocol.results import Result, batch_request_id, output_line, unanswered_line, with_columns


class LineAnswer(NamedTuple):
    """A line with its result, or with a (code, message) if it has none."""

    line: int
    custom_id: str
    result: Result | None
    reason: tuple[str, str]
    columns: Mapping[str, Any] = {}  # of the line's row

    @property
    def bytes(self) -> int:
        """Return its approximate size in memory."""
        kept = sum(len(value) for value in self.columns.values() if isinstance(value, str | list))
        return len(self.custom_id) + kept + (0 if self.result is None else len(self.result.body))


def jsonl_line(batch: str, answer: LineAnswer) -> bytes:
    """Return OpenAI's result line."""
    request_id = batch_request_id(batch, answer.line)
    if answer.result is None:
        line = unanswered_line(answer.custom_id, *answer.reason, request_id)
    else:
        line = output_line(answer.custom_id, answer.result, request_id)
    return with_columns(line, answer.columns) + b"\n"
