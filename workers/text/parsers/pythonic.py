"""Parse tool calls of Llama 3.2 and 4, ToolACE and others: a Python list of calls."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from workers.text.parsers.call_reader import CallReader
from workers.text.parsers.json_value import dump_json
from workers.text.parsers.python_literal import read_call

_HEAD = re.compile(r"[^\W\d][\w.]{0,255}\s{0,9}")
_MARK = re.compile(r"""[^\\'"()\[\]{}]+|\\.|\"\"\"|'''|["'()\[\]{}]""", re.DOTALL)


class PythonicParser(CallReader):
    """Parse `[f(a=1, b="x"), g()]`, with nothing before it.

    A call is passed on once it is complete: its arguments must be parsed before they are written as
    JSON.
    """

    name = "pythonic"

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._raw = ""  # text before a possible next call
        self._end = CallEnd()

    def _outside(self, final: bool) -> bool:
        """Read the beginning of the answer."""
        first = self._skip_space()
        if first == "[":
            self._raw, self._text = self._raw + first, self._text[1:]
            self._read = self._before_call
        elif first or final:
            self._read = self._no_call
        return bool(first) or final

    def _before_call(self, final: bool) -> bool:
        first = self._skip_space()
        if first == "]" and self._calls:
            self._text = self._text[1:]
            self._read = self._behind_calls
        elif first and _HEAD.match(first):
            self._end = CallEnd()
            self._read = self._in_call
        elif first or final:
            self._read = self._no_call
        return bool(first) or final

    def _in_call(self, final: bool) -> bool:
        parenthesis = self._text.find("(")
        sound = _HEAD.fullmatch(self._text, 0, len(self._text) if parenthesis < 0 else parenthesis) is not None
        end = self._end.search(self._text, final) if sound and parenthesis > 0 else None
        if end is not None:
            self._read_call(end)
        elif final or not sound:
            self._read = self._no_call
        return end is not None or final or not sound

    def _read_call(self, end: int) -> None:
        try:
            name, arguments = read_call(self._text[:end])
            written = dump_json(arguments)
        except ValueError:  # also for a number with too many digits
            self._read = self._no_call
            return
        self._raw, self._text = "", self._text[end:]
        self._begin_call(name)
        self._add_arguments(written)
        self._read = self._behind_call

    def _behind_call(self, final: bool) -> bool:
        first = self._skip_space()
        if first == ",":
            self._text = self._text[1:]
            self._read = self._before_call
        elif first:
            self._read = self._behind_calls if first == "]" else self._no_call
        return bool(first)

    def _behind_calls(self, final: bool) -> bool:
        self._text = ""
        return False

    def _no_call(self, final: bool) -> bool:
        """Read the rest of an answer that is not a list of calls."""
        self._say_always(self._raw + self._text)
        self._raw = self._text = ""
        return False

    def _skip_space(self) -> str:
        """Return the next character, or "" if there is no more text yet."""
        text = self._text.lstrip()
        self._raw += self._text[: len(self._text) - len(text)]
        self._text = text
        return text[:1]


class CallEnd:
    """Find the parenthesis that ends a call."""

    def __init__(self) -> None:
        self._position = self._depth = 0
        self._quote = ""  # of the open string

    def search(self, text: str, final: bool) -> int | None:
        """Return the end of the call, or None so far; `text` extends that of the last search."""
        while (mark := _MARK.match(text, self._position)) is not None:
            if not final and self._may_grow(mark.group(), text):
                return None
            self._position = self._behind(mark)
            if mark.group() in (")", "]", "}") and not self._quote and self._depth == 0:
                return self._position
        return None

    def _may_grow(self, mark: str, text: str) -> bool:
        """Return whether a quote may become three with more text."""
        rest = text[self._position :] if mark in ("'", '"') and len(text) - self._position < 3 else ""
        return len(self._quote) != 1 and rest != "" and rest == mark * len(rest)

    def _behind(self, found: re.Match[str]) -> int:
        mark = found.group()
        if self._quote:
            if not mark.startswith(self._quote):
                return found.end()
            end = found.start() + len(self._quote)
            self._quote = ""
            return end
        if mark[0] in "\"'":
            self._quote = mark
        elif mark in "([{":
            self._depth += 1
        elif mark in ")]}":
            self._depth -= 1
        return found.end()
