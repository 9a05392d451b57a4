"""Parse tool calls of Mistral: calls after a special token, in the two forms of its tokenizers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from workers.text.parsers.call_list import CallListReader
from workers.text.parsers.json_value import JsonValue
from workers.text.parsers.markers import Markers

_CALLS = "[TOOL_CALLS]"
_ARGUMENTS = "[ARGS]"
_CALL_ID = "[CALL_ID]"
_NAME = re.compile(r"""\s*[^\s\[\]{}()"',;:<>]*\s*""")


class MistralParser(CallListReader):
    """Parse `[TOOL_CALLS] [{"name": "f", "arguments": {}}]`, the form of tokenizers before version
    11, and `[TOOL_CALLS]f{}` or `[TOOL_CALLS]f[ARGS]{}`.

    The special token is never content, even if no call follows it.
    """

    name = "mistral"
    markers = (_CALLS, _ARGUMENTS, _CALL_ID)
    lenient = True

    _begin = Markers(_CALLS)
    _name_ends = Markers(_CALLS, _ARGUMENTS, _CALL_ID, "{")
    _id_ends = Markers(_CALLS, _ARGUMENTS, "{")

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._function = ""
        self._value: JsonValue | None = None  # arguments in progress

    def _outside(self, final: bool) -> bool:
        text, marker = self._until(self._begin, final)
        self._say(text)
        if marker is not None:
            self._read = self._behind_token
        return marker is not None

    def _behind_token(self, final: bool) -> bool:
        """Distinguish the two forms."""
        self._text = self._text.lstrip()
        if not self._text or (_CALLS.startswith(self._text) and not final):
            return False
        if self._text.startswith(_CALLS):
            self._read = self._outside
        elif self._text[0] in "[{":
            self._begin_list()
        else:
            self._function = ""
            self._read = self._in_name
        return True

    def _in_name(self, final: bool) -> bool:
        text, marker = self._until(self._name_ends, final)
        self._function += text
        if _NAME.fullmatch(self._function) is None:  # an answer in words
            self._text = self._function + (marker or "") + self._text
            self._read = self._outside
            return True
        if marker == _CALL_ID:
            self._read = self._in_call_id
        elif marker is not None or final:
            self._begin_arguments(marker)
        return marker is not None

    def _in_call_id(self, final: bool) -> bool:
        _, marker = self._until(self._id_ends, final)
        if marker is not None or final:
            self._begin_arguments(marker)
        return marker is not None

    def _begin_arguments(self, marker: str | None) -> None:
        self._begin_call(self._function.strip())
        if marker is not None and marker != _ARGUMENTS:
            self._text = marker + self._text
        self._value = None
        self._read = self._in_arguments
        if marker is None:
            self._in_arguments(True)

    def _in_arguments(self, final: bool) -> bool:
        text, marker = self._until(self._begin, final)
        if self._value is None:
            text = text.lstrip()
            self._value = JsonValue(text[0]) if text else None
        end = 0 if self._value is None else self._value.feed(text, 0)
        self._add_arguments(text[:end])
        ended = self._value is not None and self._value.complete
        if not (ended or marker or final):
            return False
        if self._value is None:
            self._add_arguments("{}")
        self._text = text[end:] + (marker or "") + self._text
        self._read = self._outside
        return bool(self._text)
