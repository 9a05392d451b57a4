"""Answers with tool calls, reasoning and schemas, through the helpers of the official client."""

import json
from collections.abc import Callable
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from jobs.protocol.requests import Claim, ParsedDelta, ToolCallDelta
from jobs.protocol.validation import parse_call
from tests.api.scripted_worker import MODEL, Answer, ScriptedWorker
from tests.support.javascript import run_javascript

Scripted = Callable[..., ScriptedWorker]
CHAT = "/v1/chat/completions"
MESSAGES: list[Any] = [{"role": "user", "content": "What is 2 + 3?"}]
STEPS = [
    ParsedDelta(1, reasoning="I add "),
    ParsedDelta(2, reasoning="them."),
    ParsedDelta(3, content="Let me "),
    ParsedDelta(4, content="compute."),
    ParsedDelta(5, tool_calls=[ToolCallDelta(0, "", "call_1", "Add")]),
    ParsedDelta(6, tool_calls=[ToolCallDelta(0, '{"a": 2,')]),
    ParsedDelta(7, tool_calls=[ToolCallDelta(0, ' "b": 3}'), ToolCallDelta(1, "{", "call_2", "Add")]),
    ParsedDelta(8, tool_calls=[ToolCallDelta(1, '"a": 4, "b": 5}')]),
]


class Add(BaseModel):
    """Adds two numbers."""

    a: int
    b: int


class Sum(BaseModel):
    """What an answer must be."""

    value: int
    kind: Literal["even", "odd"]


TOOLS = [openai.pydantic_function_tool(Add)]


def test_an_answer_calls_tools(client: openai.OpenAI, scripted: Scripted) -> None:
    scripted(lambda claim: STEPS)
    answer = client.chat.completions.parse(model=MODEL, messages=MESSAGES, tools=TOOLS)
    [choice] = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me compute.")
    assert choice.message.model_extra == dict.fromkeys(("reasoning", "reasoning_content"), "I add them.")
    calls = choice.message.tool_calls or []
    assert [(call.id, call.type, call.function.parsed_arguments) for call in calls] == [
        ("call_1", "function", Add(a=2, b=3)),
        ("call_2", "function", Add(a=4, b=5)),
    ]


def test_the_stream_helper_puts_the_same_answer_together(client: openai.OpenAI, scripted: Scripted) -> None:
    scripted(lambda claim: STEPS)
    whole = client.chat.completions.parse(model=MODEL, messages=MESSAGES, tools=TOOLS).choices[0]
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, tools=TOOLS) as stream:
        events = list(stream)
        choice = stream.get_final_completion().choices[0]
    assert (choice.finish_reason, choice.message.content) == (whole.finish_reason, whole.message.content)
    assert choice.message.model_extra == whole.message.model_extra
    for found, expected in zip(choice.message.tool_calls or [], whole.message.tool_calls or [], strict=True):
        assert (found.id, found.type) == (expected.id, expected.type)
        assert (found.function.name, found.function.arguments) == (expected.function.name, expected.function.arguments)
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [(event.index, event.name, event.parsed_arguments) for event in done] == [
        (0, "Add", Add(a=2, b=3)),
        (1, "Add", Add(a=4, b=5)),
    ]
    [content] = [event for event in events if event.type == "content.done"]
    assert content.content == "Let me compute."


def answered(claim: Claim) -> Answer:
    """Calls two tools, says what they returned, or keeps to a schema, whatever was asked for."""
    call = parse_call(CHAT, json.loads(claim.request.body))
    if call.output_format is not None:
        return ['{"value": 5, ', '"kind": "odd"}']
    results = [message["content"] for message in call.messages if message["role"] == "tool"]
    return [ParsedDelta(1, content=" and ".join(results))] if results else STEPS


def test_the_javascript_client_reads_them_too(api_url: str, scripted: Scripted) -> None:
    scripted(answered)
    run_javascript("parsed.js", api_url)


def test_tools_are_called_until_there_is_an_answer(client: openai.OpenAI, scripted: Scripted) -> None:
    scripted(answered)
    messages = [*MESSAGES]
    while True:
        choice = client.chat.completions.parse(model=MODEL, messages=messages, tools=TOOLS).choices[0]
        if choice.finish_reason != "tool_calls":
            break
        messages.append(choice.message.to_dict())
        for call in choice.message.tool_calls or []:
            numbers = call.function.parsed_arguments
            assert isinstance(numbers, Add)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(numbers.a + numbers.b)})
    assert (choice.finish_reason, choice.message.content) == ("stop", "5 and 9")


def test_a_schema_of_pydantic_is_read(client: openai.OpenAI, scripted: Scripted) -> None:
    worker = scripted(answered)
    answer = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Sum)
    assert answer.choices[0].message.parsed == Sum(value=5, kind="odd")
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, response_format=Sum) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == Sum(value=5, kind="odd")
    for claim in worker.claims:
        found = parse_call(CHAT, json.loads(claim.request.body)).output_format
        assert found is not None
        schema = json.loads(found.source)
        assert (found.kind, list(schema["properties"])) == ("json_schema", ["value", "kind"])


def test_the_stored_stream_of_a_call_stays_text(http: httpx.Client, scripted: Scripted) -> None:
    scripted(lambda claim: STEPS)
    with http.stream("POST", CHAT, json={"model": MODEL, "messages": MESSAGES, "stream": True}) as answer:
        stream_id = answer.headers["x-stream-id"]
        answer.read()
    stored = http.get(f"/v1/streams/{stream_id}").text
    assert '"tool_calls":[{"index"' not in stored
    assert stored.count('"text":"?"') == len(STEPS)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "Sub"}}}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"extra_body": {"structured_outputs": {}}}, "structured_outputs"),
    ],
)
def test_what_cannot_be_read_is_refused(client: openai.OpenAI, scripted: Scripted, body: Any, param: str) -> None:
    worker = scripted(lambda claim: STEPS)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, **body)
    assert caught.value.param == param
    assert worker.claims == []
