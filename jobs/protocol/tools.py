"""The tools that a chat's answer may or must call."""

from typing import Any, ClassVar, NoReturn

import msgspec

from jobs.protocol import fields
from jobs.protocol.output_format import canonical_json
from jobs.protocol.value_types import Schema

MOST_TOOLS = 128

_TEXT_OR_NULL: Schema = {"type": ["string", "null"]}
_FUNCTION: Schema = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": fields.NAME,
        "description": _TEXT_OR_NULL,
        "parameters": {"type": ["object", "null"]},
        "strict": {"type": ["boolean", "null"]},
    },
}
_NAMED: Schema = {"type": "object", "required": ["name"], "properties": {"name": {"type": "string", "minLength": 1}}}


class ToolChoice(msgspec.Struct, frozen=True):
    """Whether an answer calls tools, and the ones it may call."""

    mode: str  # "none", "auto" or "required"
    name: str | None = None  # the tool that it must call
    allowed: tuple[str, ...] = ()  # the tools that it may call; empty for all


class Tools:
    """Functions that an answer may call; passed to templates unchanged."""

    schema: ClassVar[Schema] = {
        "type": "array",
        "maxItems": MOST_TOOLS,
        "items": {
            "type": "object",
            "required": ["type", "function"],
            "properties": {"type": {"const": "function"}, "function": _FUNCTION},
        },
    }
    summary: ClassVar[str] = f"up to {MOST_TOOLS} functions"

    def read(self, value: Any, param: str) -> list[dict[str, Any]]:
        tools = fields.array(value, param, MOST_TOOLS)
        for i, tool in enumerate(tools):
            _check_function(_member(tool, "function", f"{param}[{i}]"), f"{param}[{i}].function.")
        canonical_json(tools, param)
        return tools


class ToolChoices:
    """OpenAI's forms of `tool_choice`."""

    schema: ClassVar[Schema] = {
        "anyOf": [
            {"enum": ["none", "auto", "required"]},
            {
                "type": "object",
                "required": ["type", "function"],
                "properties": {"type": {"const": "function"}, "function": _NAMED},
            },
            {
                "type": "object",
                "required": ["type", "allowed_tools"],
                "properties": {
                    "type": {"const": "allowed_tools"},
                    "allowed_tools": {
                        "type": "object",
                        "required": ["mode", "tools"],
                        "properties": {
                            "mode": {"enum": ["auto", "required"]},
                            "tools": {
                                "type": "array",
                                "minItems": 1,
                                "maxItems": MOST_TOOLS,
                                "items": {
                                    "type": "object",
                                    "required": ["type", "function"],
                                    "properties": {"type": {"const": "function"}, "function": _NAMED},
                                },
                            },
                        },
                    },
                },
            },
        ]
    }
    summary: ClassVar[str] = "none, auto, required, or the one to call"

    def read(self, value: Any, param: str) -> ToolChoice:
        if isinstance(value, str):
            return ToolChoice(fields.choice(value, param, ("none", "auto", "required")))
        if not isinstance(value, dict):
            fields.wrong_type(value, "one of a string or an object", param)
        if value.get("type") != "allowed_tools":
            return ToolChoice("required", _name(value, param))
        given, path = _member(value, "allowed_tools", param), f"{param}.allowed_tools"
        mode = fields.choice(fields.required(given, "mode", f"{path}."), f"{path}.mode", ("auto", "required"))
        tools = fields.array(fields.required(given, "tools", f"{path}."), f"{path}.tools", MOST_TOOLS, least=1)
        return ToolChoice(mode, None, tuple(_name(tool, f"{path}.tools[{i}]") for i, tool in enumerate(tools)))


def settle_tools(values: dict[str, Any]) -> None:
    """Resolve, in place, the tools of a chat: `tools`, `tool_choice` and `tool_name`.

    Raise `ApiError` 400 for a choice of missing tools, and for a required call in an answer of
    another format. A required call removes `response_format`.
    """
    tools: list[dict[str, Any]] = values.get("tools", [])
    choice: ToolChoice = values.pop("tool_choice", None) or ToolChoice("auto")
    if not tools and (choice.mode == "required" or choice.allowed):
        _refuse("'tool_choice' is only allowed when 'tools' are specified")
    names = {tool["function"]["name"] for tool in tools}
    for name in choice.allowed if choice.name is None else (choice.name,):
        if name not in names:
            _refuse(f"no function named '{fields.shown(name)}' was specified in the 'tools' parameter")
    if choice.mode == "required":
        _take_format_back(values)
    if choice.allowed:
        values["tools"] = [tool for tool in tools if tool["function"]["name"] in choice.allowed]
    values |= {"tool_choice": choice.mode if tools else "none", "tool_name": choice.name}


def _take_format_back(values: dict[str, Any]) -> None:
    """Remove `response_format` beside a required tool call; refuse other formats.

    OpenAI's `response_format` is about the content, and an answer with a required call has none.
    vLLM refuses its own parameters beside such a call.
    """
    form = values.pop("output_format", None)
    if form is not None and form.param != "response_format":
        _refuse(f"it asks for a call of a tool, and '{form.param}' for an answer of another form")


def _refuse(why: str) -> NoReturn:
    fields.fail(f"Invalid value for 'tool_choice': {why}.", "tool_choice", None)


def _check_function(function: dict[str, Any], prefix: str) -> None:
    fields.name(fields.required(function, "name", prefix), f"{prefix}name")
    fields.optional(function, "description", fields.text, None, prefix)
    fields.optional(function, "parameters", fields.mapping, None, prefix)
    fields.optional(function, "strict", fields.boolean, None, prefix)


def _name(value: Any, param: str) -> str:
    function = _member(value, "function", param)
    return fields.text(fields.required(function, "name", f"{param}.function."), f"{param}.function.name", least=1)


def _member(value: Any, kind: str, param: str) -> dict[str, Any]:
    """Return the member of an object that has the name of its type."""
    given = fields.mapping(value, param)
    fields.choice(fields.required(given, "type", f"{param}."), f"{param}.type", (kind,))
    return fields.mapping(fields.required(given, kind, f"{param}."), f"{param}.{kind}")
