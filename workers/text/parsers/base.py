"""Define the parsers of an answer's text, and their output."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class ToolCallPiece:
    """The next piece of a tool call; its first piece has the function's name."""

    index: int  # position of the call in its answer
    arguments: str = ""
    name: str | None = None


class Parsed(NamedTuple):
    """The parsed content, reasoning and call pieces of a piece of text."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallPiece, ...] = ()


def joined_pieces(pieces: Sequence[ToolCallPiece]) -> tuple[ToolCallPiece, ...]:
    """Return one piece per call."""
    if len(pieces) <= 1:
        return tuple(pieces)
    joined: dict[int, ToolCallPiece] = {}
    for piece in pieces:
        before = joined.get(piece.index)
        joined[piece.index] = (
            piece if before is None else ToolCallPiece(piece.index, before.arguments + piece.arguments, before.name)
        )
    return tuple(joined.values())


class OutputParser(Protocol):
    """Parse one answer's text, piece by piece.

    The joined output does not depend on how the text was split. No text raises an error: text that
    cannot be parsed as a call is content.
    """

    def feed(self, text: str) -> Parsed:
        """Return the output that is final now; text that may begin a marker is held back."""
        ...

    def finish(self) -> Parsed:
        """Return the text held back, once no more text comes."""
        ...


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """A model family's syntax of calls with JSON arguments, for grammars that enforce it.

    A call is `begin(name)`, the arguments' object, `end`. Several calls are joined by `separator`.
    """

    trigger: str  # every call begins with it, and only a call may follow it
    before_name: str
    before_arguments: str
    end: str
    separator: str

    def begin(self, name: str) -> str:
        """Return the text before the arguments of a function."""
        return f"{self.before_name}{name}{self.before_arguments}"


class ToolParser(ABC):
    """Parse the tool calls of one answer, in the syntax of one model family.

    It is an `OutputParser`; its content is the text outside calls.
    """

    name: ClassVar[str]
    # Texts that must reach the parser even if they are special tokens of the vocabulary
    markers: ClassVar[tuple[str, ...]] = ()
    call_syntax: ClassVar[CallSyntax | None] = None  # None if JSON Schema cannot express the arguments

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """Take the request's tools in OpenAI's shape, for the types of their parameters."""
        self._tools = tools

    @abstractmethod
    def feed(self, text: str) -> Parsed:
        """Return the output that is final now."""

    @abstractmethod
    def finish(self) -> Parsed:
        """Return the text held back, once no more text comes."""
