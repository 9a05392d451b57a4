"""Split reasoning from the answer behind it."""

from __future__ import annotations

from dataclasses import dataclass

from workers.text.parsers.base import Parsed
from workers.text.parsers.markers import Markers


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How the models of one family mark their reasoning."""

    name: str
    begin: str
    end: str  # a grammar for the answer begins behind it
    also_end: tuple[str, ...] = ()  # these end it too, and belong to the answer
    assumed: bool = False  # whether an answer without the first tag begins with reasoning

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that must reach the parser although they may be special tokens."""
        return (self.begin, self.end, *self.also_end)

    def in_reasoning(self, prompt: str) -> bool | None:
        """Return whether the answer to a rendered prompt begins inside reasoning (True), behind it
        (False), or the prompt does not say (None).

        Templates open it with the first tag, and rule it out with an empty pair of tags.
        """
        tail = prompt.rstrip()
        if tail.endswith(self.begin):
            return True
        return False if tail.endswith(self.end) else None

    def in_continued(self, answer: str) -> bool | None:
        """Return the same for an answer that goes on, given what there is of it in the prompt."""
        begin, end = answer.rfind(self.begin), answer.rfind(self.end)
        return None if begin == end else begin > end


class ReasoningParser:
    """Reads one answer that may begin with reasoning; its content is what follows that.

    An `OutputParser`. The first tag is dropped where the text begins with it; most templates have
    written it into the prompt.
    """

    def __init__(self, format: ReasoningFormat, inside: bool | None = None) -> None:
        """`inside` is what the format's `in_reasoning` says of the prompt."""
        self._format = format
        self._ends = Markers(format.end, *format.also_end)
        self._text = ""  # not read yet
        self._started = inside is False  # whether it is known how the text begins
        self._inside = inside is True or (inside is None and format.assumed)

    @property
    def inside(self) -> bool:
        """Whether the text read so far ends inside the reasoning."""
        return self._inside

    def feed(self, text: str) -> Parsed:
        """Return what is certain by now."""
        return self._read(text, final=False)

    def finish(self) -> Parsed:
        """Return what was kept, once no more text comes."""
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


REASONING_FORMATS = {
    each.name: each
    for each in (
        ReasoningFormat("deepseek_r1", "<think>", "</think>", assumed=True),
        ReasoningFormat("qwen3", "<think>", "</think>", also_end=("<tool_call>",)),
    )
}
