"""Parse calls that a grammar enforced: `tool_choice` is `required`, or names a function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workers.text.parsers.call_list import CallListReader
from workers.text.parsers.call_reader import CallReader
from workers.text.parsers.json_call import JsonCall
from workers.text.parsers.json_value import JsonValue


class RequiredCallsParser(CallListReader):
    """Parse `[{"name": "f", "parameters": {}}]`, the form that vLLM enforces.

    A text that ends early has no content: it is a call with cut arguments, if its function is
    clear.
    """

    name = "required"
    argument_keys = ("parameters", "arguments")

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._names = {tool["function"]["name"] for tool in tools}
        self._begun = False

    def _outside(self, final: bool) -> bool:
        text = self._text.lstrip()
        if not text and not final:
            return False
        if text.startswith("[") and not self._begun:
            self._text = text
            self._begin_list()
        else:
            self._say(self._text)
            self._text = ""
        self._begun = True
        return bool(self._text)

    def _between_calls(self, final: bool) -> bool:
        if final and self._raw and not self._text.strip():
            self._text = ""
            self._read = self._begin_object()
            return True
        return super()._between_calls(final)

    def _end_call(self, call: JsonCall) -> None:
        call.cut(self._names)


class NamedCallParser(CallReader):
    """Parse the arguments of a call of one function; the text has nothing else."""

    name = "named"

    def __init__(self, function: str) -> None:
        super().__init__()
        self._function = function
        self._value = JsonValue("{")

    def _outside(self, final: bool) -> bool:
        text = self._text.lstrip()
        if text.startswith("{") and not self._calls:
            self._text = text
            self._begin_call(self._function)
            self._read = self._in_arguments
            return True
        if text or final:
            self._read = self._behind
        return bool(text) or final

    def _in_arguments(self, final: bool) -> bool:
        end = self._value.feed(self._text, 0)
        self._add_arguments(self._text[:end])
        self._text = self._text[end:]
        if self._value.complete:
            self._read = self._behind
        return bool(self._text)

    def _behind(self, final: bool) -> bool:
        self._say(self._text)
        self._text = ""
        return False
