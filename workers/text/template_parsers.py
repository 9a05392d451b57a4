"""Find the parser of tool calls that fits a model, by its chat template.

A template renders the calls of earlier turns as the model was trained to write them.
"""

from __future__ import annotations

from typing import Any

import msgspec

from workers.text.chat_template import ChatTemplate
from workers.text.errors import TemplateError
from workers.text.parsers.base import ToolParser, joined_pieces
from workers.text.parsers.registry import TOOL_PARSERS, find_tool_parser

_FUNCTION = "get_weather"
_ARGUMENTS = {"place": "Rome"}
_ID = "abcdefghi"  # the only form that Mistral's templates accept
_QUESTION = {"role": "user", "content": "How is the weather?"}
_ANSWER = "§"  # in no template
_PLACE = {"type": "string", "description": "A city"}
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": _FUNCTION,
        "description": "Return the weather",
        "parameters": {"type": "object", "properties": {"place": _PLACE}, "required": ["place"]},
    },
}


def recognize_tool_parser(template: ChatTemplate) -> type[ToolParser] | None:
    """Return the parser that reads a call as the template writes it; None unless exactly one
    does.
    """
    try:
        written = _written_call(template)
    except TemplateError:
        return None
    parsers = {find_tool_parser(name) for name in TOOL_PARSERS}
    fitting = [parser for parser in parsers if _reads(parser, written)]
    return fitting[0] if len(fitting) == 1 else None


def _written_call(template: ChatTemplate) -> str:
    """Return the text in which a turn with a tool call differs from one with an answer."""
    function = {"name": _FUNCTION, "arguments": msgspec.json.encode(_ARGUMENTS).decode()}
    call = {"id": _ID, "type": "function", "function": function}
    answering, calling = (
        template.render(
            [_QUESTION, {"role": "assistant", "content": content, "tool_calls": calls}],
            tools=[_TOOL],
            add_generation_prompt=False,
        )
        for content, calls in ((_ANSWER, None), ("", [call]))
    )
    head, _, tail = answering.partition(_ANSWER)
    fits = calling.startswith(head) and calling.endswith(tail)
    return calling.removeprefix(head).removesuffix(tail) if fits else ""


def _reads(parser: type[ToolParser], written: str) -> bool:
    """Return whether the parser finds the call and nothing else."""
    reader = parser([_TOOL])
    first, last = reader.feed(written), reader.finish()
    calls = joined_pieces((*first.tool_calls, *last.tool_calls))
    if len(calls) != 1 or (first.content + last.content).strip():
        return False
    try:
        return calls[0].name == _FUNCTION and msgspec.json.decode(calls[0].arguments) == _ARGUMENTS
    except msgspec.DecodeError:
        return False
