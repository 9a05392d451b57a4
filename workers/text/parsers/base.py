"""What a parser of an answer's text is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class ToolCallPiece:
    """The next piece of a tool call; its first piece has the name."""

    index: int  # of the call in its answer
    arguments: str = ""
    name: str | None = None


class Parsed(NamedTuple):
    """What a piece of text turned out to be."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallPiece, ...] = ()


class OutputParser(Protocol):
    """Reads one answer's text, piece by piece.

    All that it returns, put together, does not depend on how the text was cut.
    """

    def feed(self, text: str) -> Parsed:
        """Return what is certain by now; text that may be the beginning of a marker is kept."""
        ...

    def finish(self) -> Parsed:
        """Return what was kept, once no more text comes."""
        ...
