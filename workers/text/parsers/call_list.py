"""Parse a JSON array of calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from workers.text.parsers.call_reader import CallReader, State
from workers.text.parsers.json_call import JsonCall

_BETWEEN = " \t\n\r,"  # between elements of an array


class CallListReader(CallReader):
    """Parse calls in an array, or a single call without an array.

    From the first element that is not a call, the array is plain text.
    """

    argument_keys: ClassVar[tuple[str, ...]] = ("arguments",)
    lenient: ClassVar[bool] = False

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._call = JsonCall()
        self._in_list = False
        self._raw = ""  # text of a list without a call so far

    def _begin_list(self) -> None:
        """Start the array or object at the beginning of the text."""
        self._in_list = self._text.startswith("[")
        self._raw, self._text = self._text[:1] if self._in_list else "", self._text[self._in_list :]
        self._read = self._between_calls if self._in_list else self._begin_object()

    def _between_calls(self, final: bool) -> bool:
        rest = self._text.lstrip(_BETWEEN)
        if self._raw:
            self._raw += self._text[: len(self._text) - len(rest)]
        self._text = rest
        if rest.startswith("{"):
            self._read = self._begin_object()
        elif rest or final:
            ended = rest.startswith("]") and not self._raw
            self._text = rest[1:] if ended else self._raw + rest
            self._read = self._outside
        return bool(rest) or final

    def _begin_object(self) -> State:
        self._call = JsonCall(self._raw, self.argument_keys, self.lenient)
        self._raw = ""
        return self._in_object

    def _in_object(self, final: bool) -> bool:
        self._feed_call(self._call, final)
        if self._call.complete and self._in_list:
            self._read = self._between_calls
        elif self._call.complete or self._call.broken:
            self._read = self._outside
        return bool(self._text)
