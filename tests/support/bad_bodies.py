"""Bad requests by their body as a whole, their prompt and their messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.support.bad_request import (
    ANSWERED,
    CHAT,
    COMPLETIONS,
    MODEL,
    NAN,
    BadRequest,
    bad,
    chat,
    completion,
    message,
    nested,
    without,
)


def _whole_bodies() -> Iterator[BadRequest]:
    for name, body in (("an array", []), ("a string", "x"), ("a number", 5), ("true", True)):
        yield bad(CHAT, body, f"body is {name}", "body", "invalid_type", "expected an object", in_file="invalid_type")
    yield bad(CHAT, None, "body is null", "body", "invalid_type", "got null", in_file="missing_required_parameter")
    for endpoint, body in ((CHAT, chat()), (COMPLETIONS, completion())):
        missing = {"in_file": ANSWERED}
        yield bad(
            endpoint,
            without(body, "model"),
            f"no model {endpoint}",
            "model",
            "missing_required_parameter",
            "'model'",
            **missing,
        )
        yield bad(
            endpoint,
            {**body, "model": None},
            f"model null {endpoint}",
            "model",
            "missing_required_parameter",
            "'model'",
            **missing,
        )
    for name, value in (("number", 3), ("array", [MODEL]), ("object", {}), ("boolean", True)):
        yield bad(
            CHAT,
            chat(model=value),
            f"model is {name}",
            "model",
            "invalid_type",
            "expected a string",
            in_file="invalid_type",
        )
    yield bad(
        CHAT,
        chat(model="\ud800"),
        "model is half a character",
        "model",
        "invalid_value",
        "surrogate",
        in_file="invalid_value",
    )
    yield bad(CHAT, chat(model=""), "model is empty", "model", "empty_string", "empty string", in_file="empty_string")
    for name, value in (
        ("unknown", "other"),
        ("long", "m" * 100_000),
        ("a path", "../../etc/passwd"),
        ("odd", "\u0000\n"),
    ):
        yield bad(
            CHAT,
            chat(model=value),
            f"model is {name}",
            "model",
            "model_not_found",
            "",
            in_file="model_not_found",
            status=404,
        )
    yield bad(
        CHAT,
        b'{"model": "demo", "messages": [{"role": "user", "content": "x"}], "temperature": 0.5, "temperature": "x"}',
        "a repeated key, the last one counts",
        "temperature",
        "invalid_type",
        "expected a decimal",
    )
    yield bad(
        CHAT,
        b'{"model": "demo", "messages": [{"role": "user", "content": "x"}], "seed": 1%b}' % (b"0" * 5000),
        "an integer of 5000 digits",
        "seed",
        "invalid_type",
        "expected an integer",
    )
    yield bad(
        CHAT,
        b'{"model": "demo", "messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
        "a number beyond floats",
        "temperature",
        "decimal_above_max_value",
        "<= 2",
    )


def _prompts() -> Iterator[BadRequest]:
    missing = "missing_required_parameter"
    yield bad(COMPLETIONS, chat(), "messages for a completion", "prompt", missing, "'prompt'")
    yield bad(CHAT, completion(), "a prompt for a chat", "messages", missing, "'messages'")
    table: list[tuple[str, Any, str, str, str]] = [
        ("number", 5, "prompt", "invalid_type", "got an integer"),
        ("boolean", True, "prompt", "invalid_type", "got a boolean"),
        ("object", {"text": "x"}, "prompt", "invalid_type", "got an object"),
        ("empty array", [], "prompt", "empty_array", "empty array"),
        ("array of an empty array", [[]], "prompt[0]", "empty_array", "empty array"),
        ("array with an empty array", [[1], []], "prompt[1]", "empty_array", "empty array"),
        ("text and tokens", ["x", [1]], "prompt[1]", "invalid_type", "expected a string"),
        ("tokens and text", [[1], "x"], "prompt[1]", "invalid_type", "expected an array of token ids"),
        ("ids and text", [1, "x"], "prompt[1]", "invalid_type", "expected an integer"),
        ("text and id", ["x", 1], "prompt[1]", "invalid_type", "expected a string"),
        ("negative id", [1, -2], "prompt[1]", "integer_below_min_value", ">= 0"),
        ("huge id", [2**31], "prompt[0]", "integer_above_max_value", "2147483648"),
        ("decimal id", [1.5], "prompt[0]", "invalid_type", "got a decimal"),
        ("boolean id", [True], "prompt[0]", "invalid_type", "got a boolean"),
        ("null id", [None], "prompt[0]", "invalid_type", "got null"),
        ("nested ids", [[[1]]], "prompt[0][0]", "invalid_type", "got an array"),
        ("half a character", "a\udfff", "prompt", "invalid_value", "surrogate"),
        ("half a character in a list", ["a", "\ud800"], "prompt[1]", "invalid_value", "surrogate"),
        ("513 prompts", ["x"] * 513, "prompt", "array_above_max_length", "maximum length 512"),
        ("100,000 prompts", ["x"] * 100_000, "prompt", "array_above_max_length", "length 100000"),
    ]
    for name, value, param, code, words in table:
        yield bad(COMPLETIONS, completion(prompt=value), f"prompt: {name}", param, code, words)
    for name, changes in (("n", {"n": 128}), ("best_of", {"best_of": 128})):
        body = completion(prompt=["x"] * 5, **changes)
        yield bad(
            COMPLETIONS, body, f"5 prompts with {name} 128", "prompt", "array_above_max_length", "maximum length 4"
        )


def _messages() -> Iterator[BadRequest]:
    missing = "missing_required_parameter"
    table: list[tuple[str, dict[str, Any], str, str, str]] = [
        ("missing", without(chat(), "messages"), "messages", missing, "'messages'"),
        ("null", chat(messages=None), "messages", missing, "'messages'"),
        ("text", chat(messages="hi"), "messages", "invalid_type", "expected an array"),
        ("object", chat(messages={"role": "user"}), "messages", "invalid_type", "expected an array"),
        ("empty", chat(messages=[]), "messages", "empty_array", "minimum length 1"),
        ("of text", chat(messages=["hi"]), "messages[0]", "invalid_type", "expected an object"),
        ("of null", chat(messages=[None]), "messages[0]", "invalid_type", "got null"),
        ("of arrays", chat(messages=[[]]), "messages[0]", "invalid_type", "got an array"),
        (
            "second bad",
            chat(messages=[{"role": "user", "content": "x"}, {"role": "user", "content": 1}]),
            "messages[1].content",
            "invalid_type",
            "got an integer",
        ),
        ("no role", chat(messages=[{"content": "hi"}]), "messages[0].role", missing, "role"),
        ("role null", message(role=None), "messages[0].role", missing, "role"),
        ("role number", message(role=1), "messages[0].role", "invalid_type", "expected a string"),
        ("role object", message(role={}), "messages[0].role", "invalid_type", "expected a string"),
        ("role unknown", message(role="robot"), "messages[0].role", "invalid_value", "'robot'"),
        ("role of a megabyte", message(role="r" * 1_000_000), "messages[0].role", "invalid_value", "rrr…"),
        ("role in capitals", message(role="User"), "messages[0].role", "invalid_value", "'User'"),
        ("no content", chat(messages=[{"role": "user"}]), "messages[0].content", missing, "content"),
        ("content null", message(content=None), "messages[0].content", missing, "content"),
        (
            "assistant without content",
            message(role="assistant", content=None),
            "messages[0].content",
            missing,
            "content",
        ),
        (
            "content number",
            message(content=5),
            "messages[0].content",
            "invalid_type",
            "expected one of a string or array of objects",
        ),
        ("content object", message(content={}), "messages[0].content", "invalid_type", "got an object"),
        ("content NaN", message(content=NAN), "messages[0].content", "invalid_type", "got a decimal"),
        ("content empty array", message(content=[]), "messages[0].content", "empty_array", "empty array"),
        ("part text", message(content=["a"]), "messages[0].content[0]", "invalid_type", "expected an object"),
        ("part without type", message(content=[{"text": "a"}]), "messages[0].content[0].type", missing, "type"),
        (
            "part image",
            message(content=[{"type": "image_url", "image_url": {"url": "x"}}]),
            "messages[0].content[0].type",
            "invalid_value",
            "'image_url'",
        ),
        (
            "part without text",
            message(content=[{"type": "text", "text": "a"}, {"type": "text"}]),
            "messages[0].content[1].text",
            missing,
            "text",
        ),
        (
            "part text number",
            message(content=[{"type": "text", "text": 4}]),
            "messages[0].content[0].text",
            "invalid_type",
            "integer",
        ),
        ("content half a character", message(content="\ud800"), "messages[0].content", "invalid_value", "surrogate"),
        (
            "part half a character",
            message(content=[{"type": "text", "text": "\udc00"}]),
            "messages[0].content[0].text",
            "invalid_value",
            "surrogate",
        ),
        ("name number", message(name=4), "messages[0].name", "invalid_type", "expected a string"),
        ("name half a character", message(name="\ud800"), "messages[0].name", "invalid_value", "surrogate"),
        (
            "tool_call_id object",
            message(role="tool", tool_call_id={}),
            "messages[0].tool_call_id",
            "invalid_type",
            "expected a string",
        ),
        (
            "tool_calls object",
            message(role="assistant", tool_calls={}),
            "messages[0].tool_calls",
            "invalid_type",
            "expected an array",
        ),
        (
            "tool_calls of numbers",
            message(role="assistant", tool_calls=[1]),
            "messages[0].tool_calls[0]",
            "invalid_type",
            "an object",
        ),
        (
            "tool_calls half a character",
            message(role="assistant", tool_calls=[{"id": "\ud800"}]),
            "messages[0].tool_calls[0].id",
            "invalid_value",
            "surrogate",
        ),
        (
            "content nested 400 deep",
            message(content=nested(400)),
            "messages[0].content[0]",
            "invalid_type",
            "got an array",
        ),
    ]
    for name, body, param, code, words in table:
        yield bad(CHAT, body, f"messages: {name}", param, code, words)


BODIES = (_whole_bodies, _prompts, _messages)
"""Each yields some of them."""
