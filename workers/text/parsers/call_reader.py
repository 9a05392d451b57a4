"""Share the state of tool parsers: unread text and its output."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from workers.text.parsers.base import Parsed, ToolCallPiece, ToolParser, joined_pieces
from workers.text.parsers.json_call import JsonCall
from workers.text.parsers.markers import Markers

_PIECE = 512  # characters; each marker copies the rest of a piece

State = Callable[[bool], bool]  # takes whether the text is final; returns whether to continue at once


class CallReader(ToolParser):
    """A state machine over an answer's text.

    White space around calls at the ends of the content is dropped. Text between and after calls is
    dropped too, unless `keeps_text_after_calls`.
    """

    keeps_text_after_calls: ClassVar[bool] = False

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._text = ""  # unread
        self._read: State = self._outside
        self._calls = 0
        self._content: list[str] = []
        self._spaces: list[str] = []  # at the end of the content; released before more content
        self._has_content = False
        self._pieces: list[ToolCallPiece] = []

    def feed(self, text: str) -> Parsed:
        """Return the output that is final now."""
        for start in range(0, len(text), _PIECE):
            self._text += text[start : start + _PIECE]
            while self._read(False):
                pass
        return self._take()

    def finish(self) -> Parsed:
        """Return the text held back, once no more text comes."""
        while self._read(True):
            pass
        if not self._calls:
            self._content += self._spaces
        return self._take()

    @abstractmethod
    def _outside(self, final: bool) -> bool:
        """Read text outside calls."""

    def _until(self, markers: Markers, final: bool) -> tuple[str, str | None]:
        """Read through the next marker; return None if there is none yet."""
        before, marker, self._text = markers.split(self._text, final)
        return before, marker

    def _say(self, text: str) -> None:
        """Add text outside calls to the content."""
        if not self._calls or self.keeps_text_after_calls:
            self._say_always(text)

    def _say_always(self, text: str) -> None:
        """Add text that looked like a call but is none to the content."""
        kept = text.rstrip()
        if kept:
            self._content += [*self._spaces, kept]
            self._spaces.clear()
            self._has_content = True
        self._spaces.append(text[len(kept) :])

    def _begin_call(self, name: str) -> None:
        if not self._has_content:
            self._spaces.clear()
        self._calls += 1
        self._pieces.append(ToolCallPiece(self._calls - 1, name=name))

    def _add_arguments(self, text: str) -> None:
        if text:
            self._pieces.append(ToolCallPiece(self._calls - 1, text))

    def _feed_call(self, call: JsonCall, final: bool) -> None:
        """Read the text of a call and pass it on."""
        self._text = self._text[call.feed(self._text) :]
        if final and not self._text:
            self._end_call(call)
        self._pass_on(call)

    def _end_call(self, call: JsonCall) -> None:
        """End a call that has no more text."""
        call.give_up()

    def _pass_on(self, call: JsonCall) -> None:
        """Pass on the new part of a call, or the text of one that turned out not to be a call."""
        name, arguments = call.take()
        if name is not None:
            self._begin_call(name)
        self._add_arguments(arguments)
        if call.broken and not call.announced:
            self._say_always(call.take_raw())

    def _take(self) -> Parsed:
        parsed = Parsed("".join(self._content), tool_calls=joined_pieces(self._pieces))
        self._content.clear()
        self._pieces.clear()
        return parsed
