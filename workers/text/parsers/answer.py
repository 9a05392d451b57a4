"""Parse one whole answer: reasoning first, then calls of tools."""

from __future__ import annotations

from dataclasses import dataclass, field

from workers.text.parsers.base import OutputParser, Parsed, joined_pieces
from workers.text.parsers.reasoning import ReasoningParser


class AnswerParser:
    """An `OutputParser` that hands what is behind the reasoning to a parser of calls.

    Either may be missing. Without `parallel` calls all but the first are dropped.
    """

    def __init__(
        self, reasoning: ReasoningParser | None = None, calls: OutputParser | None = None, parallel: bool = True
    ) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._parallel = parallel

    @property
    def reasoning(self) -> bool:
        """Whether the text read so far ends inside the reasoning."""
        return self._reasoning is not None and self._reasoning.inside

    def feed(self, text: str) -> Parsed:
        """Return what is certain by now."""
        return self._behind(Parsed(text) if self._reasoning is None else self._reasoning.feed(text))

    def finish(self) -> Parsed:
        """Return what was kept, once no more text comes."""
        parsed = self._behind(Parsed() if self._reasoning is None else self._reasoning.finish())
        if self._calls is None:
            return parsed
        last = self._allowed(self._calls.finish())
        return Parsed(
            parsed.content + last.content, parsed.reasoning, joined_pieces((*parsed.tool_calls, *last.tool_calls))
        )

    def _behind(self, parsed: Parsed) -> Parsed:
        if self._calls is None or not parsed.content:
            return parsed
        return self._allowed(self._calls.feed(parsed.content))._replace(reasoning=parsed.reasoning)

    def _allowed(self, parsed: Parsed) -> Parsed:
        if self._parallel:
            return parsed
        return parsed._replace(tool_calls=tuple(piece for piece in parsed.tool_calls if piece.index == 0))


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
    """Read a text that is there already."""
    answer = WholeAnswer()
    answer.add(parser.feed(text))
    answer.add(parser.finish())
    return answer
