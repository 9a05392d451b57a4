"""Parse calls that a grammar enforced: `tool_choice` is `required`, or names a function."""

from __future__ import annotations

from workers.text.parsers.call_list import CallListReader
from workers.text.parsers.call_reader import CallReader
from workers.text.parsers.json_value import JsonValue


class RequiredCallsParser(CallListReader):
    """Parse `[{"name": "f", "parameters": {}}]`, the form that vLLM enforces."""

    name = "required"
    argument_keys = ("parameters", "arguments")

    def __init__(self) -> None:
        super().__init__()
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
