"""Separate reasoning from the answer after it."""

from __future__ import annotations

from workers.text.parsers.base import Parsed
from workers.text.parsers.markers import Markers
from workers.text.parsers.reasoning_formats import ReasoningFormat


class ReasoningParser:
    """Parse one answer that may begin with reasoning; its content is the text after it.

    It is an `OutputParser`. The first tag is dropped if the text begins with it; most templates
    already have it in the prompt.
    """

    def __init__(self, format: ReasoningFormat, inside: bool | None = None) -> None:
        """`inside` is the result of the format's `in_reasoning` for the prompt."""
        self._format = format
        self._ends = Markers(format.end, *format.also_end)
        self._text = ""  # unread
        self._started = inside is False  # whether the beginning of the text is known
        self._inside = inside is True or (inside is None and format.assumed)

    @property
    def inside(self) -> bool:
        """Return whether the text read so far ends inside the reasoning."""
        return self._inside

    def feed(self, text: str) -> Parsed:
        """Return the output that is final now."""
        return self._read(text, final=False)

    def finish(self) -> Parsed:
        """Return the text held back, once no more text comes."""
        return self._read("", final=True)

    def _read(self, text: str, final: bool) -> Parsed:
        self._text += text
        if not self._started and not self._start(final):
            return Parsed()
        if self._inside:
            return self._read_reasoning(final)
        content, self._text = self._text, ""
        return Parsed(content)

    def _start(self, final: bool) -> bool:
        """Drop the first tag, once it is known whether the text begins with it."""
        begin, text = self._format.begin, self._text.lstrip()
        if not final and len(text) < len(begin) and begin.startswith(text):
            return False
        if text.startswith(begin):
            self._text = text[len(begin) :]
            self._inside = True
        self._started = True
        return True

    def _read_reasoning(self, final: bool) -> Parsed:
        reasoning, marker, rest = self._ends.split(self._text, final)
        if marker is None:
            self._text = rest
            return Parsed(reasoning=reasoning)
        self._inside, self._text = False, ""
        return Parsed(rest if marker == self._format.end else marker + rest, reasoning)
