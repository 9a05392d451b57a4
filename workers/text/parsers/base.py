"""What parsers of an answer's text are, and what they return."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol


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
    """Reads one answer's text, piece by piece.

    All that it returns, put together, does not depend on how the text was cut. No text makes it
    raise: what cannot be read as a call is content.
    """

    def feed(self, text: str) -> Parsed:
        """Return what is certain by now; text that may be the beginning of a marker is kept."""
        ...

    def finish(self) -> Parsed:
        """Return what was kept, once no more text comes."""
        ...


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How a family writes a call whose arguments are JSON, for grammars that enforce it.

    A call is `begin(name)`, the arguments' object, `end`. Several calls are joined by `separator`.
    """

    trigger: str  # text behind which there can only be a call; calls begin with it
    before_name: str
    before_arguments: str
    end: str
    separator: str

    def begin(self, name: str) -> str:
        """Return what is written before the arguments of a function."""
        return f"{self.before_name}{name}{self.before_arguments}"


class ToolParser(ABC):
    """Reads the tool calls of one answer, as the models of one family write them.

    It is an `OutputParser` whose content is the text that belongs to no call.
    """

    name: ClassVar[str]
    # Texts that must reach the parser although they are special tokens of some vocabularies
    markers: ClassVar[tuple[str, ...]] = ()
    call_syntax: ClassVar[CallSyntax | None] = None  # None where JSON Schema cannot say it

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """Take the request's tools in OpenAI's shape: their parameters may have types that the
        family does not write.
        """
        self._tools = tools

    @abstractmethod
    def feed(self, text: str) -> Parsed:
        """Return what is certain by now."""

    @abstractmethod
    def finish(self) -> Parsed:
        """Return what was kept, once no more text comes."""
