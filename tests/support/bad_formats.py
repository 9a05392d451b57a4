"""Bad requests by the form of the answer, its tools, its reasoning and the chat template."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.support.bad_request import CHAT, COMPLETIONS, INF, NAN, BadRequest, bad, chat, completion, nested

_MISSING = "missing_required_parameter"
_SCHEMA = {"type": "object"}
_LONG = 2**18 + 1


def tool(name: Any = "f", **function: Any) -> dict[str, Any]:
    """A tool, and what is changed of its function."""
    return {"type": "function", "function": {"name": name, **function}}


def named(name: Any) -> dict[str, Any]:
    """The choice of one tool."""
    return {"type": "function", "function": {"name": name}}


def named_schema(**changes: Any) -> dict[str, Any]:
    """A response format of a schema, and what is changed of it."""
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA, **changes}}


def _formats() -> Iterator[BadRequest]:
    within = "response_format.json_schema"
    table: list[tuple[Any, str, str, str]] = [
        ("json", "response_format", "invalid_type", "expected an object"),
        ({}, "response_format.type", _MISSING, "response_format.type"),
        ({"type": "xml"}, "response_format.type", "invalid_value", "'json_object', 'json_schema'"),
        ({"type": ["text"]}, "response_format.type", "invalid_type", "expected a string"),
        ({"type": "json_schema"}, within, _MISSING, within),
        ({"type": "json_schema", "json_schema": []}, within, "invalid_type", "expected an object"),
        (named_schema(name=None), f"{within}.name", _MISSING, "name"),
        (named_schema(name="a b"), f"{within}.name", "invalid_value", "does not match pattern"),
        (named_schema(name="a\n"), f"{within}.name", "invalid_value", "does not match pattern"),
        (named_schema(name="n" * 65), f"{within}.name", "string_above_max_length", "maximum length 64"),
        (named_schema(description=5), f"{within}.description", "invalid_type", "expected a string"),
        (named_schema(strict="yes"), f"{within}.strict", "invalid_type", "expected a boolean"),
        (named_schema(schema=None), f"{within}.schema", _MISSING, "schema"),
        (named_schema(schema=True), f"{within}.schema", "invalid_type", "expected an object"),
        (named_schema(schema="{}"), f"{within}.schema", "invalid_type", "expected an object"),
        (named_schema(schema={"const": "\ud800"}), f"{within}.schema", "invalid_value", "cannot be written"),
        (named_schema(schema={"minimum": NAN}), f"{within}.schema", "invalid_value", "cannot be written"),
        (named_schema(schema={"minimum": -INF}), f"{within}.schema", "invalid_value", "cannot be written"),
        (named_schema(schema={"const": "x" * _LONG}), within, "string_above_max_length", "maximum length 262144"),
        ({"type": "structural_tag"}, "response_format.format", _MISSING, "format"),
        ({"type": "structural_tag", "format": []}, "response_format.format", "invalid_type", "an object"),
        (
            {"type": "structural_tag", "structures": [], "triggers": ["a"]},
            "response_format.structures",
            "empty_array",
            "minimum length 1",
        ),
        (
            {"type": "structural_tag", "structures": [{"begin": "a", "schema": {}}], "triggers": ["a"]},
            "response_format.structures[0].end",
            _MISSING,
            "end",
        ),
        (
            {"type": "structural_tag", "structures": [{"begin": "a", "schema": {}, "end": ""}]},
            "response_format.triggers",
            _MISSING,
            "triggers",
        ),
    ]
    for number, (value, param, code, words) in enumerate(table):
        yield bad(CHAT, chat(response_format=value), f"response_format {number}", param, code, words)
    body = completion(response_format={"type": "xml"})
    yield bad(COMPLETIONS, body, "response_format of a completion", "response_format.type", "invalid_value", "'xml'")


def _structured_outputs() -> Iterator[BadRequest]:
    table: list[tuple[Any, str, str, str]] = [
        ([], "", "invalid_type", "expected an object"),
        ("json", "", "invalid_type", "expected an object"),
        ({}, "", "invalid_value", "exactly one of 'json', 'regex'"),
        ({"whitespace_pattern": " "}, "", "invalid_value", "got none of them"),
        ({"json_object": False}, "", "invalid_value", "got none of them"),
        ({"json": _SCHEMA, "regex": "a"}, "", "invalid_value", "got 'json' and 'regex'"),
        ({"choice": ["a"], "json_object": True}, "", "invalid_value", "got 'choice' and 'json_object'"),
        ({"json": 5}, ".json", "invalid_type", "expected an object"),
        ({"json": "{"}, ".json", "invalid_value", "the text is not JSON"),
        ({"json": "[1]"}, ".json", "invalid_type", "expected an object"),
        ({"json": "[" * 1000}, ".json", "invalid_value", "nested too deeply"),
        ({"json": "{\ud800}"}, ".json", "invalid_value", "surrogate"),
        ({"regex": ""}, ".regex", "empty_string", "empty string"),
        ({"regex": ["a"]}, ".regex", "invalid_type", "expected a string"),
        ({"regex": "a\ud800"}, ".regex", "invalid_value", "surrogate"),
        ({"regex": "a" * _LONG}, ".regex", "string_above_max_length", "maximum length 262144"),
        ({"choice": "a"}, ".choice", "invalid_type", "expected an array"),
        ({"choice": []}, ".choice", "empty_array", "minimum length 1"),
        ({"choice": ["a", ""]}, ".choice[1]", "empty_string", "empty string"),
        ({"choice": [1]}, ".choice[0]", "invalid_type", "expected a string"),
        ({"choice": ["a"] * 10_001}, ".choice", "array_above_max_length", "maximum length 10000"),
        ({"grammar": {}}, ".grammar", "invalid_type", "expected a string"),
        ({"json_object": "yes"}, ".json_object", "invalid_type", "expected a boolean"),
        ({"structural_tag": "<a>"}, ".structural_tag", "invalid_value", "the text is not JSON"),
        ({"structural_tag": {"type": "tag", "format": {}}}, ".structural_tag.type", "invalid_value", "'tag'"),
        ({"structural_tag": {"structures": {}}}, ".structural_tag.structures", "invalid_type", "an array"),
        ({"json": {}, "whitespace_pattern": 5}, ".whitespace_pattern", "invalid_type", "expected a string"),
        ({"json": {}, "disable_any_whitespace": 1}, ".disable_any_whitespace", "invalid_type", "a boolean"),
        (
            {"json": {}, "disable_additional_properties": True},
            ".disable_additional_properties",
            "unsupported_value",
            "must be false",
        ),
    ]
    for number, (value, path, code, words) in enumerate(table):
        param = f"structured_outputs{path}"
        yield bad(CHAT, chat(structured_outputs=value), f"structured_outputs {number}", param, code, words)
    body = completion(structured_outputs={"choice": []})
    param = "structured_outputs.choice"
    yield bad(COMPLETIONS, body, "structured_outputs of a completion", param, "empty_array", "minimum length 1")


def _guided() -> Iterator[BadRequest]:
    table: list[tuple[str, Any, str, str]] = [
        ("guided_json", [], "invalid_type", "expected an object"),
        ("guided_json", "x", "invalid_value", "the text is not JSON"),
        ("guided_json", {"a": "\udc00"}, "invalid_value", "cannot be written"),
        ("guided_regex", 5, "invalid_type", "expected a string"),
        ("guided_regex", "", "empty_string", "empty string"),
        ("guided_choice", {}, "invalid_type", "expected an array"),
        ("guided_grammar", [], "invalid_type", "expected a string"),
        ("guided_whitespace_pattern", 5, "invalid_type", "expected a string"),
        ("guided_whitespace_pattern", " " * 1001, "string_above_max_length", "maximum length 1000"),
        ("structural_tag", "", "invalid_value", "the text is not JSON"),
    ]
    for number, (name, value, code, words) in enumerate(table):
        yield bad(CHAT, chat(**{name: value}), f"{name} {number}", name, code, words)
    pairs: list[tuple[dict[str, Any], str, str]] = [
        ({"response_format": {"type": "json_object"}, "guided_json": {}}, "guided_json", "'response_format' gives"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "'guided_regex' gives the form"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": named_schema()},
            "structured_outputs",
            "'response_format' gives",
        ),
    ]
    for number, (changes, param, words) in enumerate(pairs):
        yield bad(CHAT, chat(**changes), f"two forms {number}", param, "invalid_value", words)
        yield bad(COMPLETIONS, completion(**changes), f"two forms {number} of a text", param, "invalid_value", words)


def _tools() -> Iterator[BadRequest]:
    function = "tools[0].function"
    table: list[tuple[Any, str, str, str]] = [
        (0, "tools", "invalid_type", "expected an array"),
        ({}, "tools", "invalid_type", "expected an array"),
        (["f"], "tools[0]", "invalid_type", "expected an object"),
        ([{}], "tools[0].type", _MISSING, "type"),
        ([{"type": "custom", "custom": {"name": "f"}}], "tools[0].type", "invalid_value", "'custom'"),
        ([{"type": "function"}], function, _MISSING, "function"),
        ([{"type": "function", "function": "f"}], function, "invalid_type", "expected an object"),
        ([tool(), {"type": "function", "function": {}}], "tools[1].function.name", _MISSING, "name"),
        ([tool("")], f"{function}.name", "empty_string", "empty string"),
        ([tool("a.b")], f"{function}.name", "invalid_value", "does not match pattern"),
        ([tool("f" * 65)], f"{function}.name", "string_above_max_length", "maximum length 64"),
        ([tool(5)], f"{function}.name", "invalid_type", "expected a string"),
        ([tool(description={})], f"{function}.description", "invalid_type", "expected a string"),
        ([tool(parameters="{}")], f"{function}.parameters", "invalid_type", "expected an object"),
        ([tool(strict=1)], f"{function}.strict", "invalid_type", "expected a boolean"),
        ([tool(parameters={"const": "\ud800"})], "tools", "invalid_value", "cannot be written"),
        ([tool()] * 129, "tools", "array_above_max_length", "maximum length 128"),
    ]
    for number, (value, param, code, words) in enumerate(table):
        yield bad(CHAT, chat(tools=value), f"tools {number}", param, code, words)
    yield bad(COMPLETIONS, completion(tools=[tool()]), "tools of a text", "tools", "unsupported_value", "is for chats")
    for kind, value in (("text", "no"), ("1", 1)):
        body = chat(tools=[tool()], parallel_tool_calls=value)
        yield bad(CHAT, body, f"parallel_tool_calls {kind}", "parallel_tool_calls", "invalid_type", "a boolean")


def _tool_choices() -> Iterator[BadRequest]:
    allowed = "tool_choice.allowed_tools"
    table: list[tuple[Any, str, str | None, str]] = [
        ("any", "tool_choice", "invalid_value", "'none', 'auto', 'required'"),
        (5, "tool_choice", "invalid_type", "expected one of a string or an object"),
        ({}, "tool_choice.type", _MISSING, "type"),
        ({"type": "custom"}, "tool_choice.type", "invalid_value", "'custom'"),
        ({"type": "function"}, "tool_choice.function", _MISSING, "function"),
        (named(None), "tool_choice.function.name", _MISSING, "name"),
        (named(""), "tool_choice.function.name", "empty_string", "empty string"),
        (named("g"), "tool_choice", None, "no function named 'g'"),
        ({"type": "allowed_tools"}, allowed, _MISSING, "allowed_tools"),
        ({"type": "allowed_tools", "allowed_tools": {"tools": [named("f")]}}, f"{allowed}.mode", _MISSING, "mode"),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
            f"{allowed}.tools",
            "empty_array",
            "minimum length 1",
        ),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named("f"), named("g")]}},
            "tool_choice",
            None,
            "no function named 'g'",
        ),
    ]
    for number, (value, param, code, words) in enumerate(table):
        yield bad(CHAT, chat(tools=[tool()], tool_choice=value), f"tool_choice {number}", param, code, words)
    without = "only allowed when 'tools' are specified"
    for number, choice in enumerate(("required", named("f"))):
        yield bad(CHAT, chat(tool_choice=choice), f"a choice without tools {number}", "tool_choice", None, without)
        body = chat(tools=[tool()], tool_choice=choice, guided_regex="a")
        yield bad(CHAT, body, f"a tool and a form {number}", "tool_choice", None, "and 'guided_regex' for an answer")
    body = completion(tool_choice="required")
    yield bad(COMPLETIONS, body, "tool_choice of a text", "tool_choice", "unsupported_value", "is for chats")


def _reasoning() -> Iterator[BadRequest]:
    names = "chat_template_kwargs"
    table: list[tuple[str, Any, str, str, str]] = [
        (names, [], names, "invalid_type", "expected an object"),
        (names, {"messages": []}, f"{names}.messages", "unsupported_value", "cannot be set"),
        (names, {"tools": []}, f"{names}.tools", "unsupported_value", "cannot be set"),
        (names, {"add_generation_prompt": 1}, f"{names}.add_generation_prompt", "unsupported_value", "cannot be set"),
        (names, {"self": 1}, f"{names}.self", "unsupported_value", "cannot be set"),
        (names, {"__class__": 1}, names, "invalid_value", "a letter first"),
        (names, {"a b": 1}, names, "invalid_value", "a letter first"),
        (names, {"a": "\ud800"}, names, "invalid_value", "cannot be written"),
        (names, {f"a{i}": 1 for i in range(65)}, names, "object_above_max_properties", "at most 64"),
        ("reasoning_effort", "huge", "reasoning_effort", "invalid_value", "'low', 'medium', 'high'"),
        ("reasoning_effort", 5, "reasoning_effort", "invalid_type", "expected a string"),
        ("include_reasoning", "no", "include_reasoning", "invalid_type", "expected a boolean"),
        ("thinking_token_budget", -2, "thinking_token_budget", "integer_below_min_value", ">= -1"),
        ("thinking_token_budget", "9", "thinking_token_budget", "invalid_type", "expected an integer"),
        ("add_generation_prompt", 1, "add_generation_prompt", "invalid_type", "expected a boolean"),
        ("continue_final_message", 1, "continue_final_message", "invalid_type", "expected a boolean"),
        ("continue_final_message", True, "continue_final_message", "invalid_value", "must be the assistant's"),
        ("return_token_ids", 1, "return_token_ids", "invalid_type", "expected a boolean"),
        ("return_tokens_as_token_ids", "x", "return_tokens_as_token_ids", "invalid_type", "expected a boolean"),
    ]
    for number, (name, value, param, code, words) in enumerate(table):
        yield bad(CHAT, chat(**{name: value}), f"{name} {number}", param, code, words)
    body = chat(continue_final_message=True, add_generation_prompt=True)
    yield bad(CHAT, body, "two ends of a prompt", "continue_final_message", "invalid_value", "cannot both be true")
    for name, value in (
        (names, {"a": 1}),
        ("reasoning_effort", "low"),
        ("include_reasoning", False),
        ("thinking_token_budget", 5),
        ("continue_final_message", True),
        ("add_generation_prompt", False),
    ):
        body = completion(**{name: value})
        yield bad(COMPLETIONS, body, f"{name} of a text", name, "unsupported_value", "is for chats")


def _tool_messages() -> Iterator[BadRequest]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    calls, function = "messages[0].tool_calls", "messages[0].tool_calls[0].function"
    table: list[tuple[dict[str, Any], str, str, str]] = [
        ({"tool_calls": [{}]}, f"{calls}[0].id", _MISSING, "id"),
        ({"tool_calls": [call, call | {"id": 5}]}, f"{calls}[1].id", "invalid_type", "expected a string"),
        ({"tool_calls": [call | {"type": None}]}, f"{calls}[0].type", _MISSING, "type"),
        ({"tool_calls": [call | {"type": "custom"}]}, f"{calls}[0].type", "invalid_value", "'custom'"),
        ({"tool_calls": [call | {"function": None}]}, function, _MISSING, "function"),
        ({"tool_calls": [call | {"function": {"arguments": "{}"}}]}, f"{function}.name", _MISSING, "name"),
        ({"tool_calls": [call | {"function": {"name": "f"}}]}, f"{function}.arguments", _MISSING, "arguments"),
        (
            {"tool_calls": [call | {"function": {"name": "f", "arguments": {}}}]},
            f"{function}.arguments",
            "invalid_type",
            "expected a string",
        ),
        ({"tool_calls": [call | {"more": [nested(3), "\ud800"]}]}, calls, "invalid_value", "cannot be written"),
        ({"reasoning_content": 5}, "messages[0].reasoning_content", "invalid_type", "expected a string"),
        ({"reasoning": ["x"]}, "messages[0].reasoning", "invalid_type", "expected a string"),
    ]
    for number, (changes, param, code, words) in enumerate(table):
        body = chat(messages=[{"role": "assistant", "content": None, **changes}])
        yield bad(CHAT, body, f"an assistant's message {number}", param, code, words)
    body = chat(messages=[{"role": "tool", "content": "5"}])
    yield bad(CHAT, body, "a tool's answer to nothing", "messages[0].tool_call_id", _MISSING, "tool_call_id")
    body = chat(messages=[{"role": "user", "content": None, "reasoning": "x"}])
    yield bad(CHAT, body, "a user's reasoning alone", "messages[0].content", _MISSING, "content")


FORMATS = (_formats, _structured_outputs, _guided, _tools, _tool_choices, _reasoning, _tool_messages)
"""Each yields some of them."""
