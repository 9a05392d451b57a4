"""Calls of tools, through the official client: forced, streamed, in a loop, and read from text."""

import json
from typing import Any

import openai
import pytest
from openai.lib.streaming.chat import FunctionToolCallArgumentsDeltaEvent, FunctionToolCallArgumentsDoneEvent

from tests.contract.forms import ADD, BODY, CHOICE, END_OF_OBJECT, PAINT, AddNumbers, Order, Paint, named

REQUIRED: dict[str, Any] = {**BODY, "tools": [ADD, PAINT], "tool_choice": "required", "parallel_tool_calls": False}
MODELS = {"AddNumbers": AddNumbers, "Paint": Paint}
CALL = r'<tool_call>\n\{"name": "AddNumbers", "arguments": \{"a": [0-9]{2}, "b": [0-9]{2}\}\}\n</tool_call>'


def test_a_call_that_is_required_is_made(model_client: openai.OpenAI) -> None:
    choice = model_client.chat.completions.parse(**REQUIRED).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    [call] = choice.message.tool_calls or []
    assert call.id
    assert isinstance(call.function.parsed_arguments, MODELS[call.function.name])


@pytest.mark.parametrize(("tool", "model"), [(ADD, AddNumbers), (PAINT, Paint)])
def test_the_function_that_is_named_is_called(model_client: openai.OpenAI, tool: Any, model: Any) -> None:
    choice = model_client.chat.completions.parse(**{**REQUIRED, "tool_choice": named(tool)}).choices[0]
    [call] = choice.message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, model)
    assert choice.finish_reason == "stop"  # as in the hosted service


@pytest.mark.parametrize("choice", ["required", named(ADD)], ids=["required", "named"])
def test_a_streamed_call_is_put_together(model_client: openai.OpenAI, choice: Any) -> None:
    asked = {**REQUIRED, "tool_choice": choice}
    with model_client.chat.completions.stream(**asked) as stream:
        events = list(stream)
        [streamed] = stream.get_final_completion().choices[0].message.tool_calls or []
    deltas = [event for event in events if isinstance(event, FunctionToolCallArgumentsDeltaEvent)]
    [done] = [event for event in events if isinstance(event, FunctionToolCallArgumentsDoneEvent)]
    assert deltas
    assert "".join(event.arguments_delta for event in deltas) == done.arguments == streamed.function.arguments
    assert done.parsed_arguments == streamed.function.parsed_arguments
    [whole] = model_client.chat.completions.parse(**asked).choices[0].message.tool_calls or []
    assert whole.function.parsed_arguments == streamed.function.parsed_arguments
    assert whole.function.name == streamed.function.name == done.name


def test_what_a_tool_returned_is_answered(model_client: openai.OpenAI) -> None:
    messages = list(BODY["messages"])
    asked = model_client.chat.completions.parse(**REQUIRED).choices[0].message
    messages.append(asked)
    for call in asked.tool_calls or []:
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "68"})
    answer = model_client.chat.completions.create(
        **{**REQUIRED, "messages": messages, "tool_choice": "none", "max_tokens": 20}
    )
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content
    assert answer.usage.prompt_tokens > 20


def test_several_calls_are_made_where_they_may_be(model_client: openai.OpenAI) -> None:
    sampled = {**REQUIRED, "parallel_tool_calls": True, "temperature": 1, "n": 3, "seed": 1, "max_tokens": 400}
    found = model_client.chat.completions.create(**sampled)
    calls = [call for choice in found.choices for call in choice.message.tool_calls or []]
    assert len(calls) >= len(found.choices)
    assert len({call.id for call in calls}) == len(calls)
    for choice in found.choices:
        complete = (choice.message.tool_calls or [])[: None if choice.finish_reason == "tool_calls" else -1]
        for call in complete:
            MODELS[call.function.name].model_validate_json(call.function.arguments)


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("streamed", [False, True])
def test_calls_are_read_from_what_a_model_writes(model_client: openai.OpenAI, parallel: bool, streamed: bool) -> None:
    asked: Any = {**BODY, "tools": [ADD, PAINT], "parallel_tool_calls": parallel}
    asked["extra_body"] = {"structured_outputs": {"regex": rf"Well\.\n{CALL}\n{CALL}"}}
    if streamed:
        with model_client.chat.completions.stream(**asked) as stream:
            choice = stream.get_final_completion().choices[0]
    else:
        choice = model_client.chat.completions.parse(**asked).choices[0]
    calls = choice.message.tool_calls or []
    assert [call.function.name for call in calls] == ["AddNumbers"] * (1 + parallel)
    assert all(isinstance(call.function.parsed_arguments, AddNumbers) for call in calls)
    assert (choice.message.content or "").strip() == "Well."
    assert choice.finish_reason == "tool_calls"


def test_no_tool_is_called_where_none_may_be(model_client: openai.OpenAI) -> None:
    asked = {**REQUIRED, "tool_choice": "none", "max_tokens": 20}
    message = model_client.chat.completions.create(**asked).choices[0].message
    assert (bool(message.content), message.tool_calls) == (True, None)


def test_a_tool_without_parameters_is_called_with_none(model_client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "ping"}}
    asked = {**REQUIRED, "tools": [tool], "logit_bias": END_OF_OBJECT}
    [call] = model_client.chat.completions.create(**asked).choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("ping", {})


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"tools": []}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "Subtract"}}}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tool_choice": "always"}, "tool_choice"),
    ],
)
def test_a_choice_that_cannot_be_is_refused(model_client: openai.OpenAI, values: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        model_client.chat.completions.create(**{**REQUIRED, **values})
    assert caught.value.param == param


def test_a_call_that_is_required_comes_before_the_form_of_a_text(model_client: openai.OpenAI) -> None:
    choice = model_client.chat.completions.parse(**REQUIRED, response_format=Order).choices[0]
    assert choice.message.parsed is None
    assert len(choice.message.tool_calls or []) == 1
    with pytest.raises(openai.BadRequestError) as caught:
        model_client.chat.completions.create(**REQUIRED, extra_body={"structured_outputs": {"choice": CHOICE}})
    assert caught.value.param == "tool_choice"
