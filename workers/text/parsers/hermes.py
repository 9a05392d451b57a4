"""Parse tool calls of Hermes, Qwen2.5, Qwen3 and many others: JSON objects between tags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workers.text.parsers.base import CallSyntax
from workers.text.parsers.call_reader import CallReader
from workers.text.parsers.json_call import JsonCall
from workers.text.parsers.markers import Markers

_BEGIN = "<tool_call>"
_END = "</tool_call>"


class HermesParser(CallReader):
    """Parse `<tool_call>{"name": "f", "arguments": {}}</tool_call>`.

    A tag ends the call even inside a string: with most vocabularies it is one token.
    """

    name = "hermes"
    markers = (_BEGIN, _END)
    call_syntax = CallSyntax(
        trigger=_BEGIN,
        before_name=f'{_BEGIN}\n{{"name": "',
        before_arguments='", "arguments": ',
        end=f"}}\n{_END}",
        separator="\n",
    )

    _begin = Markers(_BEGIN)
    _end = Markers(_END)

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._call = JsonCall()

    def _outside(self, final: bool) -> bool:
        text, marker = self._until(self._begin, final)
        self._say(text)
        if marker is None:
            return False
        self._call = JsonCall(marker)
        self._read = self._inside
        return True

    def _inside(self, final: bool) -> bool:
        text, marker = self._until(self._end, final)
        rest = text[self._call.feed(text) :]
        if marker is not None or final:
            rest += marker or ""
            self._read = self._outside
            self._call.give_up()
        self._pass_on(self._call)
        if not self._call.announced:
            self._say_always(rest)
        return marker is not None
