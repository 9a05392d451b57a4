"""What a chat may ask of tools, of its template and of its reasoning."""

from typing import Any

import pytest

from jobs.protocol.chat import CHAT
from jobs.protocol.completions import COMPLETIONS
from jobs.protocol.validation import Call, parse_call

USER = {"role": "user", "content": "x"}
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}, "more": 1},
    {"type": "function", "function": {"name": "g-2", "strict": True, "parameters": None}},
]
F, G = ({"type": "function", "function": {"name": name}} for name in ("f", "g-2"))
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def call_of(**changes: Any) -> Call:
    return parse_call(CHAT, {"model": "m", "messages": [USER], **changes})


def allowed(mode: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


@pytest.mark.parametrize(
    ("choice", "mode", "name", "tools"),
    [
        (None, "auto", None, TOOLS),
        ("auto", "auto", None, TOOLS),
        ("none", "none", None, TOOLS),
        ("required", "required", None, TOOLS),
        (G, "required", "g-2", TOOLS),
        (allowed("auto", F), "auto", None, TOOLS[:1]),
        (allowed("required", G), "required", None, TOOLS[1:]),
        (allowed("auto", G, F), "auto", None, TOOLS),
    ],
)
def test_choices(choice: Any, mode: str, name: str | None, tools: list[Any]) -> None:
    call = call_of(tools=TOOLS, tool_choice=choice)
    assert (call.tool_choice, call.tool_name, call.tools) == (mode, name, tools)


@pytest.mark.parametrize("given", [{}, {"tools": []}, {"tools": None}])
@pytest.mark.parametrize("choice", [None, "none", "auto"])
def test_without_tools_none_is_chosen(given: dict[str, Any], choice: str | None) -> None:
    call = call_of(tool_choice=choice, **given)
    assert (call.tool_choice, call.tool_name, call.tools, call.parallel_tool_calls) == ("none", None, [], True)


def test_a_completion_has_no_tools() -> None:
    call = parse_call(COMPLETIONS, {"model": "m", "prompt": "x", "tools": [], "tool_choice": "auto"})
    assert (call.tool_choice, call.tool_name, call.tools) == ("none", None, [])


def test_128_tools_and_a_form_that_an_answer_may_have_instead() -> None:
    tools = [{"type": "function", "function": {"name": f"{number}".zfill(64)}} for number in range(128)]
    call = call_of(tools=tools, parallel_tool_calls=False, response_format={"type": "json_object"})
    assert (len(call.tools), call.tool_choice, call.parallel_tool_calls) == (128, "auto", False)
    assert call.output_format is not None


@pytest.mark.parametrize("choice", ["required", F])
def test_where_a_tool_must_be_called_the_form_of_the_content_does_not_matter(choice: Any) -> None:
    call = call_of(tools=TOOLS, tool_choice=choice, response_format={"type": "json_object"})
    assert (call.tool_choice, call.output_format) == ("required", None)


def test_what_an_assistant_said_is_kept_for_the_template() -> None:
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [CALL | {"index": 0}], "reasoning_content": "why"},
        {"role": "tool", "content": "5", "tool_call_id": "call_1"},
        {"role": "assistant", "content": "five", "reasoning": "because"},
        {"role": "assistant", "reasoning": ""},
        {"role": "assistant", "content": "", "tool_calls": []},
    ]
    assert call_of(messages=messages).messages == [
        {"role": "assistant", "content": "", "tool_calls": [CALL | {"index": 0}], "reasoning_content": "why"},
        {"role": "tool", "content": "5", "tool_call_id": "call_1"},
        {"role": "assistant", "content": "five", "reasoning": "because"},
        {"role": "assistant", "content": "", "reasoning": ""},
        {"role": "assistant", "content": "", "tool_calls": []},
    ]


@pytest.mark.parametrize(
    ("given", "variables"),
    [
        ({}, {}),
        (
            {"chat_template_kwargs": {"enable_thinking": False, "a": [{"b": None}]}},
            {"enable_thinking": False, "a": [{"b": None}]},
        ),
        ({"reasoning_effort": "low"}, {"enable_thinking": True, "reasoning_effort": "low"}),
        ({"reasoning_effort": "none"}, {"enable_thinking": False, "reasoning_effort": "none"}),
        (
            {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False, "reasoning_effort": "low"}},
            {"enable_thinking": False, "reasoning_effort": "high"},
        ),
    ],
)
def test_variables_of_the_template(given: dict[str, Any], variables: dict[str, Any]) -> None:
    assert call_of(**given).chat_template_kwargs == variables


def test_reasoning() -> None:
    call = call_of()
    assert (call.include_reasoning, call.thinking_token_budget) == (True, None)
    call = call_of(include_reasoning=False, thinking_token_budget=0)
    assert (call.include_reasoning, call.thinking_token_budget) == (False, 0)
    assert call_of(thinking_token_budget=-1).thinking_token_budget is None


@pytest.mark.parametrize(
    ("given", "ends"),
    [
        ({}, (True, False)),
        ({"add_generation_prompt": False}, (False, False)),
        ({"continue_final_message": True}, (False, True)),
        ({"continue_final_message": True, "add_generation_prompt": False}, (False, True)),
        ({"continue_final_message": False, "add_generation_prompt": True}, (True, False)),
    ],
)
def test_where_the_prompt_ends(given: dict[str, Any], ends: tuple[bool, bool]) -> None:
    call = call_of(messages=[USER, {"role": "assistant", "content": "It is"}], **given)
    assert (call.add_generation_prompt, call.continue_final_message) == ends


def test_token_ids_and_the_usage_of_a_stream() -> None:
    call = call_of()
    assert (call.return_token_ids, call.return_tokens_as_token_ids) == (False, False)
    assert (call.include_usage, call.continuous_usage_stats) == (False, False)
    wanted = {"include_usage": True, "continuous_usage_stats": True}
    call = call_of(return_token_ids=True, return_tokens_as_token_ids=True, stream=True, stream_options=wanted)
    assert (call.return_token_ids, call.return_tokens_as_token_ids) == (True, True)
    assert (call.include_usage, call.continuous_usage_stats) == (True, True)
    alone = call_of(stream=True, stream_options={"continuous_usage_stats": True})
    assert (alone.include_usage, alone.continuous_usage_stats) == (False, False)
