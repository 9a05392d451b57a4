"""The input of a call: the prompts of a completion, the messages of a chat."""

from collections.abc import Sequence
from typing import Any

from jobs.protocol import fields
from jobs.protocol.messages import REASONING
from jobs.protocol.output_format import canonical_json
from jobs.protocol.text_or_tokens import TOKEN_IDS, read_text_or_tokens, read_token_ids
from jobs.protocol.value_types import Schema

MOST_MESSAGES = 10_000
MOST_SEQUENCES = 512
"""Most sequences of one request: prompts times the larger of `n` and `best_of`."""

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_TEXTS = ("name", "tool_call_id", *REASONING)  # string members that a message may have

_TEXT: Schema = {"type": "string"}
_TEXT_OR_NULL: Schema = {"type": ["string", "null"]}
_PARTS: Schema = {
    "type": "array",
    "minItems": 1,
    "maxItems": MOST_MESSAGES,
    "items": {"type": "object", "required": ["type", "text"], "properties": {"type": {"const": "text"}, "text": _TEXT}},
}
_TOOL_CALLS: Schema = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["id", "type", "function"],
        "properties": {
            "id": _TEXT,
            "type": {"const": "function"},
            "function": {
                "type": "object",
                "required": ["name", "arguments"],
                "properties": {"name": {"type": "string", "minLength": 1}, "arguments": _TEXT},
            },
        },
    },
}
_BY_ASSISTANT: Schema = {"role": {"const": "assistant"}}
_MESSAGE: Schema = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": list(_ROLES)},
        "content": {"anyOf": [_TEXT, _PARTS, {"type": "null"}]},
        **dict.fromkeys(_TEXTS, _TEXT_OR_NULL),
        "tool_calls": {"anyOf": [_TOOL_CALLS, {"type": "null"}]},
    },
    "if": {"properties": {"role": {"const": "tool"}}},
    "then": {"required": ["tool_call_id"], "properties": {"tool_call_id": _TEXT}},
    "anyOf": [
        {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}},
        {"required": ["tool_calls"], "properties": _BY_ASSISTANT | {"tool_calls": {"type": "array", "minItems": 1}}},
        *({"required": [name], "properties": _BY_ASSISTANT | {name: _TEXT}} for name in REASONING),
    ],
}
MESSAGES: Schema = {"type": "array", "minItems": 1, "maxItems": MOST_MESSAGES, "items": _MESSAGE}
"""The JSON Schema of messages that `read_messages` accepts."""

PROMPT: Schema = {
    "anyOf": [
        _TEXT_OR_NULL,
        TOKEN_IDS,
        {"type": "array", "minItems": 1, "maxItems": MOST_SEQUENCES, "items": _TEXT},
        {"type": "array", "minItems": 1, "maxItems": MOST_SEQUENCES, "items": TOKEN_IDS},
    ]
}
"""The JSON Schema of prompts that `read_prompts` accepts; with several answers the limit is
lower.
"""


def read_prompts(value: Any, param: str, answers: int) -> list[str | list[int]]:
    """Return the prompts, each to be answered `answers` times.

    The value is one text, one list of token ids, or a list of either. None and an empty text mean
    the beginning of a text. Raise `ApiError`.
    """
    if value is None:
        return [""]
    if not isinstance(value, list):
        return [read_text_or_tokens(value, param)]
    fields.array(value, param, least=1)
    if not isinstance(value[0], str | list):
        return [read_token_ids(value, param)]
    if len(value) * answers > MOST_SEQUENCES:
        most = MOST_SEQUENCES // answers
        fields.fail(
            f"Invalid '{param}': array too long. With {answers} answers to each prompt, expected an array with maximum"
            f" length {most}, but got an array with length {len(value)} instead.",
            param,
            "array_above_max_length",
        )
    return [read_text_or_tokens(item, f"{param}[{i}]", like=value[0]) for i, item in enumerate(value)]


def read_messages(value: Any, param: str) -> list[dict[str, Any]]:
    """Return messages with a role and a content: a string, or text parts. Raise `ApiError`."""
    return [
        _message(message, f"{param}[{i}]")
        for i, message in enumerate(fields.array(value, param, MOST_MESSAGES, least=1))
    ]


def settle_final_message(values: dict[str, Any]) -> None:
    """Resolve, in place, whether a chat's last message is continued or an answer begins.

    Raise `ApiError` 400 if both are requested.
    """
    if not values.get("continue_final_message", False):
        return
    if values.get("add_generation_prompt", False):
        message = "'continue_final_message' and 'add_generation_prompt' cannot both be true."
        fields.fail(message, "continue_final_message", "invalid_value")
    values["add_generation_prompt"] = False


def check_continued(messages: Sequence[dict[str, Any]]) -> None:
    """Raise `ApiError` 400 unless the last message is the assistant's, so that it can be
    continued.
    """
    if messages[-1]["role"] != "assistant":
        message = "Invalid 'continue_final_message': the last message must be the assistant's."
        fields.fail(message, "continue_final_message", "invalid_value")


def _message(value: Any, param: str) -> dict[str, Any]:
    given = fields.mapping(value, param)
    role = fields.choice(fields.required(given, "role", f"{param}."), f"{param}.role", _ROLES)
    message: dict[str, Any] = {"role": role, "content": _content(given, role, f"{param}.content")}
    for name in _TEXTS:
        if given.get(name) is not None:
            message[name] = fields.text(given[name], f"{param}.{name}")
    if role == "tool":
        fields.required(given, "tool_call_id", f"{param}.")
    if given.get("tool_calls") is not None:
        message["tool_calls"] = _tool_calls(given["tool_calls"], f"{param}.tool_calls")
    return message


def _content(message: dict[str, Any], role: str, param: str) -> str | list[dict[str, str]]:
    content = message.get("content")
    if content is None:
        if role == "assistant" and (message.get("tool_calls") or _has_reasoning(message)):
            return ""
        fields.missing(param)
    if isinstance(content, str):
        return fields.text(content, param)
    if not isinstance(content, list):
        fields.wrong_type(content, "one of a string or array of objects", param)
    parts = fields.array(content, param, MOST_MESSAGES, least=1)
    return [_text_part(part, f"{param}[{i}]") for i, part in enumerate(parts)]


def _has_reasoning(message: dict[str, Any]) -> bool:
    return any(message.get(name) is not None for name in REASONING)


def _text_part(value: Any, param: str) -> dict[str, str]:
    part = fields.mapping(value, param)
    fields.choice(fields.required(part, "type", f"{param}."), f"{param}.type", ("text",))
    text = fields.text(fields.required(part, "text", f"{param}."), f"{param}.text")
    return {"type": "text", "text": text}


def _tool_calls(value: Any, param: str) -> list[Any]:
    calls = fields.array(value, param)
    for i, call in enumerate(calls):
        _check_tool_call(fields.mapping(call, f"{param}[{i}]"), f"{param}[{i}].")
    canonical_json(calls, param)
    return calls


def _check_tool_call(call: dict[str, Any], prefix: str) -> None:
    fields.text(fields.required(call, "id", prefix), f"{prefix}id")
    fields.choice(fields.required(call, "type", prefix), f"{prefix}type", ("function",))
    function = fields.mapping(fields.required(call, "function", prefix), f"{prefix}function")
    prefix += "function."
    fields.text(fields.required(function, "name", prefix), f"{prefix}name", least=1)
    fields.text(fields.required(function, "arguments", prefix), f"{prefix}arguments")
