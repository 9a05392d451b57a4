"""Parse one whole answer: reasoning first, then tool calls."""

from __future__ import annotations

import logging

from workers.text.parsers.base import OutputParser, Parsed, joined_pieces
from workers.text.parsers.reasoning import ReasoningParser

_log = logging.getLogger(__name__)


class AnswerParser:
    """Pass the text after the reasoning to a tool parser, as an `OutputParser`.

    Either parser may be missing. Without `parallel`, all calls but the first are dropped. If a tool
    parser raises, as a plugin may, the rest of the answer is content.
    """

    def __init__(
        self, reasoning: ReasoningParser | None = None, calls: OutputParser | None = None, parallel: bool = True
    ) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._parallel = parallel

    @property
    def reasoning(self) -> bool:
        """Return whether the text read so far ends inside the reasoning."""
        return self._reasoning is not None and self._reasoning.inside

    def feed(self, text: str) -> Parsed:
        """Return the output that is final now."""
        if self._reasoning is None:
            return self._read(text)
        parsed = self._reasoning.feed(text)
        return _after(parsed.reasoning, self._read(parsed.content))

    def finish(self) -> Parsed:
        """Return the text held back, once no more text comes."""
        parsed = Parsed() if self._reasoning is None else self._reasoning.finish()
        first, last = self._read(parsed.content), self._read_end()
        pieces = joined_pieces((*first.tool_calls, *last.tool_calls))
        return Parsed(first.content + last.content, parsed.reasoning, pieces)

    def _read(self, content: str) -> Parsed:
        if self._calls is None or not content:
            return Parsed(content)
        try:
            return self._allowed(self._calls.feed(content))
        except Exception:
            self._give_up()
            return Parsed(content)

    def _read_end(self) -> Parsed:
        if self._calls is None:
            return Parsed()
        try:
            return self._allowed(self._calls.finish())
        except Exception:
            self._give_up()
            return Parsed()

    def _give_up(self) -> None:
        _log.exception("tool call parser %s failed; the rest of the answer is content", type(self._calls).__name__)
        self._calls = None

    def _allowed(self, parsed: Parsed) -> Parsed:
        if self._parallel or not parsed.tool_calls:
            return parsed
        return Parsed(parsed.content, tool_calls=tuple(piece for piece in parsed.tool_calls if piece.index == 0))


def _after(reasoning: str, parsed: Parsed) -> Parsed:
    return Parsed(parsed.content, reasoning, parsed.tool_calls) if reasoning else parsed
