"""What a line of a finished batch came to."""

from typing import NamedTuple

from jobs.protocol.results import Result


class LineAnswer(NamedTuple):
    """A line with its result, or with the (code, message) of why it has none."""

    line: int
    custom_id: str
    result: Result | None
    reason: tuple[str, str]
