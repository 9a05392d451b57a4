"""Feed a parser a text, whole or in pieces, and put together what it returns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from workers.text.parsers.base import OutputParser, Parsed


@dataclass(slots=True)
class WholeCall:
    """A call, put together."""

    name: str
    arguments: str = ""


@dataclass(slots=True)
class WholeAnswer:
    """Everything that a parser returned, put together."""

    content: str = ""
    reasoning: str = ""
    calls: list[WholeCall] = field(default_factory=list)

    def add(self, parsed: Parsed) -> None:
        """Append the next pieces."""
        self.content += parsed.content
        self.reasoning += parsed.reasoning
        for piece in parsed.tool_calls:
            if piece.name is not None:
                self.calls.append(WholeCall(piece.name))
            self.calls[piece.index].arguments += piece.arguments


def parse_whole(parser: OutputParser, text: str) -> WholeAnswer:
    return parse_pieces(parser, [text])


def parse_pieces(parser: OutputParser, pieces: Iterable[str]) -> WholeAnswer:
    answer = WholeAnswer()
    for piece in pieces:
        answer.add(parser.feed(piece))
    answer.add(parser.finish())
    return answer


def pieces(text: str, cuts: Iterable[int]) -> list[str]:
    return [text[start:end] for start, end in pairwise([0, *sorted(cuts), len(text)])]


def calls(answer: WholeAnswer) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in answer.calls]
