"""Convert a call's choice of tools to the output format of its answer."""

from __future__ import annotations

from typing import Any

from jobs.protocol.output_format import OutputFormat
from jobs.protocol.results import encode_json
from jobs.protocol.validation import Call
from workers.text.parsers.base import CallSyntax

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_DATA = frozenset({"const", "enum", "default", "examples"})  # keywords that contain values, not schemas
_SPACE = " ?"  # between the tokens of a call's JSON, which needs no layout
_NAMES = frozenset({"$schema", "$id", "id"})
_BY_NAME = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})


def format_of(call: Call, syntax: CallSyntax | None) -> OutputFormat | None:
    """Return the output format of a call's answers, or None if it has none.

    This is the format in the request, else that of the tool calls which the answer must be or may
    contain. `syntax` is the model's tool-call syntax, if a schema of the arguments can be enforced.
    """
    if call.output_format is not None:
        return call.output_format
    if call.tool_choice == "required":
        return _forced_format(call)
    strict = any(_function(tool).get("strict") for tool in call.tools)
    return _strict_format(call, syntax) if call.tool_choice == "auto" and strict and syntax is not None else None


def _forced_format(call: Call) -> OutputFormat:
    """Return the format of a forced call.

    A named function's answer is its arguments alone; otherwise it is a list of calls, each an
    object of `name` and `parameters`.
    """
    schema = _calls_schema(call) if call.tool_name is None else _parameters_of(_named(call))
    return OutputFormat("json_schema", encode_json(schema).decode(), "tools", _SPACE)


def _strict_format(call: Call, syntax: CallSyntax) -> OutputFormat:
    """Return the format of text whose calls name only given tools and follow the schemas of strict
    ones.
    """
    tag = {
        "type": "triggered_tags",
        "triggers": [syntax.trigger],
        "tags": [_call_tag(_function(tool), syntax) for tool in call.tools],
        "stop_after_first": not call.parallel_tool_calls,
    }
    return OutputFormat("structural_tag", encode_json({"format": tag}).decode(), "tools", _SPACE)


def _call_tag(function: dict[str, Any], syntax: CallSyntax) -> dict[str, Any]:
    schema = _parameters_of(function) if function.get("strict") else {"type": "object"}
    content = {"type": "json_schema", "json_schema": schema}
    return {"begin": syntax.begin(function["name"]), "content": content, "end": syntax.end}


def _named(call: Call) -> dict[str, Any]:
    return next(function for function in map(_function, call.tools) if function["name"] == call.tool_name)


def _calls_schema(call: Call) -> dict[str, Any]:
    functions = [_function(tool) for tool in call.tools]
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": [_call_schema(function["name"], number) for number, function in enumerate(functions)]},
        "$defs": {f"tool{i}": _moved(_parameters_of(one), f"#/$defs/tool{i}") for i, one in enumerate(functions)},
    }
    return schema if call.parallel_tool_calls else {**schema, "maxItems": 1}


def _call_schema(name: str, number: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/tool{number}"}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    function: dict[str, Any] = tool["function"]
    return function


def _parameters_of(function: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a function's arguments, which are an object.

    Its `$id` is removed, so that its references resolve within the whole schema.
    """
    parameters = {key: value for key, value in (function.get("parameters") or {}).items() if key not in _NAMES}
    return {"type": "object", **parameters} if parameters else _NO_PARAMETERS


def _moved(schema: Any, place: str) -> Any:
    """Return a schema whose references to itself are rewritten for its position `place` in
    another.
    """
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _moved_value(key, value, place) for key, value in schema.items()}


def _moved_value(key: str, value: Any, place: str) -> Any:
    if key in _DATA:
        return value
    if key in _BY_NAME and isinstance(value, dict):
        return {name: _moved(schema, place) for name, schema in value.items()}
    if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
        return place + value[1:]
    return _moved(value, place)
