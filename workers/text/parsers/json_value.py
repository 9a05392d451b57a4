"""Find the end of a JSON value in text that arrives in pieces."""

from __future__ import annotations

import json
import re
from typing import Any

_STRUCTURE = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[,\]}\s]")
_SPACE = re.compile(r"[ \t\n\r]*")
_FIRST_CHARACTERS = frozenset('"{[-0123456789tfnNI')


def skip_space(text: str, position: int) -> int:
    """Return the end of JSON's white space."""
    found = _SPACE.match(text, position)
    return position if found is None else found.end()


def may_begin_value(character: str) -> bool:
    """Return whether a JSON value may begin with this character."""
    return character in _FIRST_CHARACTERS


def decode_string(text: str) -> str | None:
    """Return the value of a JSON string, control characters allowed; None if it is invalid or has
    half of a surrogate pair.
    """
    try:
        value = json.loads(text, strict=False)
        if isinstance(value, str):
            value.encode()
            return value
    except ValueError:
        pass
    return None


def dump_json(value: Any) -> str:
    """Return a value as JSON, in UTF-8 unless it has half of a surrogate pair."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


class JsonValue:
    """Track quotes and brackets of one value up to its end.

    Nothing else is checked: models leave out commas, and a call with a mistake in its arguments is
    still a call.
    """

    __slots__ = ("_depth", "_escaped", "_in_string", "_scalar", "complete")

    def __init__(self, first_character: str) -> None:
        self._depth = 0
        self._in_string = self._escaped = False
        self._scalar = first_character not in '"{['
        self.complete = False

    def feed(self, text: str, start: int) -> int:
        """Return the end of the part of the value that begins at `start`."""
        position = start
        while position < len(text) and not self.complete:
            position = self._scalar_end(text, position) if self._scalar else self._advance(text, position)
        return position

    def _scalar_end(self, text: str, position: int) -> int:
        found = _SCALAR_END.search(text, position)
        self.complete = found is not None
        return len(text) if found is None else found.start()

    def _advance(self, text: str, position: int) -> int:
        if self._escaped:
            self._escaped = False
            return position + 1
        found = (_IN_STRING if self._in_string else _STRUCTURE).search(text, position)
        if found is None:
            return len(text)
        self._turn(found.group())
        return found.end()

    def _turn(self, character: str) -> None:
        if character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = not self._in_string
        else:
            self._depth += 1 if character in "{[" else -1
        self.complete = self._depth <= 0 and not self._in_string
