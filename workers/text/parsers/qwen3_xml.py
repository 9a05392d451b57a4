"""Parse tool calls of Qwen3-Coder and Qwen3.5: calls in tags, a tag for each parameter."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from workers.text.parsers.call_reader import CallReader
from workers.text.parsers.json_value import dump_json
from workers.text.parsers.markers import Markers
from workers.text.parsers.parameter_types import is_text, parameter_types, read_value

_BEGIN = "<tool_call>"
_END = "</tool_call>"
_FUNCTION = "<function="
_FUNCTION_END = "</function>"
_PARAMETER = "<parameter="
_PARAMETER_END = "</parameter>"


class Qwen3XmlParser(CallReader):
    """Parse `<tool_call><function=f><parameter=a>text</parameter></function></tool_call>`.

    Text is passed on as it arrives, a value of another type once it is complete. The outer tags and
    the end of a parameter may be missing, since models sometimes omit them.
    """

    name = "qwen3_coder"
    markers = (_BEGIN, _END)
    keeps_text_after_calls = True

    _begins = Markers(_BEGIN, _FUNCTION)
    _preamble_ends = Markers(_FUNCTION, _BEGIN, _END)
    _name_ends = Markers(">", _FUNCTION, _FUNCTION_END, _BEGIN, _END)
    _argument_marks = Markers(_PARAMETER, _FUNCTION, _FUNCTION_END)
    _key_ends = Markers(">", _PARAMETER, _FUNCTION, _FUNCTION_END)
    _value_ends = Markers(_PARAMETER_END, _PARAMETER, _FUNCTION, _FUNCTION_END)
    _call_ends = Markers(_END, _BEGIN, _FUNCTION)

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._raw = ""  # of a possible call
        self._function = self._key = ""
        self._parameters = 0
        self._types: frozenset[str] = frozenset()
        self._value = ""  # not passed on yet
        self._value_begun = False

    def _outside(self, final: bool) -> bool:
        text, marker = self._until(self._begins, final)
        self._say(text)
        if marker is not None:
            self._begin(marker)
        return marker is not None

    def _begin(self, marker: str) -> None:
        self._raw, self._function = marker, ""
        self._read = self._in_preamble if marker == _BEGIN else self._in_name

    def _in_preamble(self, final: bool) -> bool:
        text, marker = self._until(self._preamble_ends, final)
        self._raw += text
        if marker == _FUNCTION:
            self._raw += marker
            self._read = self._in_name
        elif marker is not None or final:
            self._reject(marker)
        return marker is not None

    def _in_name(self, final: bool) -> bool:
        text, marker = self._until(self._name_ends, final)
        self._raw += text
        self._function += text
        if marker == ">" and self._function.strip():
            self._function = self._function.strip()
            self._begin_call(self._function)
            self._parameters = 0
            self._read = self._in_arguments
        elif marker is not None or final:
            self._reject(marker)
        return marker is not None

    def _reject(self, marker: str | None) -> None:
        """Give up text that is not a call; a marker may begin the next."""
        self._read = self._outside
        if marker in (_BEGIN, _FUNCTION):
            self._text = marker + self._text
            marker = None
        self._say(self._raw + (marker or ""))

    def _in_arguments(self, final: bool) -> bool:
        """Read the text around parameters."""
        _, marker = self._until(self._argument_marks, final)
        if marker == _PARAMETER:
            self._key = ""
            self._read = self._in_key
        elif marker is not None or final:
            self._add_arguments("}" if self._parameters else "{}")
            self._read = self._behind_function
        if marker == _FUNCTION:
            self._begin(marker)
        return marker is not None

    def _in_key(self, final: bool) -> bool:
        text, marker = self._until(self._key_ends, final)
        self._key += text
        if marker == ">":
            self._begin_value(self._key.strip())
        elif marker is not None or final:  # not a parameter
            self._text = (marker or "") + self._text
            self._read = self._in_arguments
        return marker is not None or final

    def _begin_value(self, key: str) -> None:
        self._add_arguments(("{" if self._parameters == 0 else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        self._parameters += 1
        self._types = parameter_types(self._tools, self._function, key)
        self._value, self._value_begun = "", False
        self._read = self._in_value

    def _in_value(self, final: bool) -> bool:
        text, marker = self._until(self._value_ends, final)
        self._value += text
        if is_text(self._types):
            self._pass_on_text(marker is not None)
        elif marker is not None:
            value = self._value.removeprefix("\n").removesuffix("\n")
            self._add_arguments(dump_json(read_value(value, self._types)))
        if marker is not None:
            self._read = self._in_arguments
        if marker is not None and marker != _PARAMETER_END:
            self._text = marker + self._text
        return marker is not None

    def _pass_on_text(self, ended: bool) -> None:
        """Pass on a string without the line breaks at its ends, which are layout."""
        text = self._value
        if text and not self._value_begun:
            self._value_begun = True
            self._add_arguments('"')
            text = text.removeprefix("\n")
        kept = text.removesuffix("\n")
        self._value = text[len(kept) :]
        self._add_arguments(json.dumps(kept, ensure_ascii=False)[1:-1])
        if ended:
            self._add_arguments('"' if self._value_begun else '""')

    def _behind_function(self, final: bool) -> bool:
        _, marker = self._until(self._call_ends, final)
        if marker == _END:
            self._read = self._outside
        elif marker is not None:
            self._begin(marker)
        return marker is not None
