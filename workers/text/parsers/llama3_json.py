"""Parse tool calls of Llama 3.1 to 3.3 and 4: bare JSON objects, separated by semicolons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workers.text.parsers.base import CallSyntax
from workers.text.parsers.call_reader import CallReader
from workers.text.parsers.json_call import JsonCall
from workers.text.parsers.markers import Markers

_TAG = "<|python_tag|>"
_KEYS = ("parameters", "arguments")


class Llama3JsonParser(CallReader):
    """Parse `{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}`.

    An object without a name and parameters is content, passed on once it is complete.
    """

    name = "llama3_json"
    call_syntax = CallSyntax(
        trigger='{"name": ',
        before_name='{"name": "',
        before_arguments='", "parameters": ',
        end="}",
        separator="; ",
    )

    _begin = Markers(_TAG, "{")

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._call = JsonCall()

    def _outside(self, final: bool) -> bool:
        text, marker = self._until(self._begin, final)
        self._say(text)
        if marker is None:
            return False
        if marker == "{":
            self._text = marker + self._text
        self._call = JsonCall("" if marker == "{" else marker, _KEYS)
        self._read = self._inside
        return True

    def _inside(self, final: bool) -> bool:
        self._feed_call(self._call, final)
        if self._call.complete or self._call.broken:
            self._read = self._outside
        return bool(self._text)
