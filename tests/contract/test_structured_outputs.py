"""Answers that must have a form: official clients parse them, whole, streamed and from batches."""

import contextlib
import json
from typing import Any

import openai
import pytest
from openai.lib.streaming.chat import ContentDeltaEvent, ContentDoneEvent

from tests.contract.calls import results, wait
from tests.contract.forms import ADD, BODY, CHOICE, COMPACT, FORMS, PAINT, AddNumbers, Color, Order, Paint, named


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1, "seed": 1, "extra_body": COMPACT}])
def test_an_answer_is_parsed_as_a_model(model_client: openai.OpenAI, sampling: dict[str, Any]) -> None:
    completion = model_client.chat.completions.parse(**{**BODY, **sampling}, response_format=Order)
    choice = completion.choices[0]
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Order)
    assert json.loads(choice.message.content or "") == choice.message.parsed.model_dump(mode="json")
    assert choice.message.parsed.color in Color
    assert completion.usage is not None
    assert 10 < completion.usage.completion_tokens <= BODY["max_tokens"]


def test_a_stream_is_parsed_while_it_comes(model_client: openai.OpenAI) -> None:
    with model_client.chat.completions.stream(**BODY, response_format=Order, extra_body=COMPACT) as stream:
        events = list(stream)
        streamed = stream.get_final_completion().choices[0]
    deltas = [event for event in events if isinstance(event, ContentDeltaEvent)]
    done = [event for event in events if isinstance(event, ContentDoneEvent)]
    assert deltas
    assert [event.content for event in done] == ["".join(event.delta for event in deltas)]
    assert done[0].parsed == streamed.message.parsed
    whole = model_client.chat.completions.parse(**BODY, response_format=Order, extra_body=COMPACT).choices[0]
    assert (streamed.message.parsed, streamed.finish_reason) == (whole.message.parsed, "stop")
    assert isinstance(whole.message.parsed, Order)


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_kept_whole_and_streamed(model_client: openai.OpenAI, name: str) -> None:
    form = FORMS[name]
    whole = model_client.chat.completions.create(**BODY, extra_body=form.body).choices[0]
    assert whole.finish_reason == "stop"
    form.check(whole.message.content)
    stream = model_client.chat.completions.create(**BODY, stream=True, extra_body=form.body)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole.message.content


def test_a_completion_keeps_its_form_too(model_client: openai.OpenAI) -> None:
    found = model_client.completions.create(
        model="demo", prompt="One of two", max_tokens=50, extra_body={"structured_outputs": {"choice": CHOICE}}
    )
    assert found.choices[0].text in CHOICE


def test_every_answer_of_several_keeps_it(model_client: openai.OpenAI) -> None:
    sampled = {**BODY, "temperature": 1, "seed": 3, "n": 4}
    found = model_client.chat.completions.create(**sampled, extra_body=FORMS["structured json as text"].body)
    texts = [choice.message.content for choice in found.choices]
    assert len(set(texts)) > 1
    for text in texts:
        FORMS["structured json as text"].check(text)


def test_log_probabilities_are_those_of_its_tokens(model_client: openai.OpenAI) -> None:
    asked = {**BODY, "logprobs": True, "top_logprobs": 2}
    choice = model_client.chat.completions.create(**asked, extra_body=FORMS["structured choice"].body).choices[0]
    positions = choice.logprobs.content
    assert "".join(position.token for position in positions) == choice.message.content
    assert all(position.logprob <= 0 and len(position.top_logprobs) == 2 for position in positions)


def test_a_stop_string_ends_an_answer_within_its_form(model_client: openai.OpenAI) -> None:
    asked = {**BODY, "stop": ["Answer"]}
    choice = model_client.chat.completions.create(**asked, extra_body=FORMS["structured regex"].body).choices[0]
    assert choice.finish_reason == "stop"
    assert len(choice.message.content) == 10
    assert choice.message.content.endswith("\n")


def test_a_limit_that_is_too_small_is_the_end(model_client: openai.OpenAI) -> None:
    short: Any = {**BODY, "max_tokens": 5}
    form = FORMS["json_schema"].body
    assert model_client.chat.completions.create(**short, extra_body=form).choices[0].finish_reason == "length"
    with pytest.raises(openai.LengthFinishReasonError):
        model_client.chat.completions.parse(**short, response_format=Order)
    with (
        pytest.raises(openai.LengthFinishReasonError),
        model_client.chat.completions.stream(**short, response_format=Order) as stream,
    ):
        stream.until_done()


def schema(value: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}}


ENDLESS = {
    "$ref": "#/$defs/a",
    "$defs": {"a": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}},
}
BAD_FORMS = {
    "an unknown type": (schema({"type": "number or so"}), "response_format", "number or so"),
    "a reference to nothing": (schema({"$ref": "#/$defs/none"}), "response_format", "none"),
    "no end": (schema(ENDLESS), "response_format", ""),
    "an unsupported keyword": (schema({"type": "array", "uniqueItems": True}), "response_format", "uniqueItems"),
    "a regex without an end": ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", ""),
    "a regex that looks ahead": ({"guided_regex": "(?=a)b"}, "guided_regex", "look-ahead"),
    "a grammar without a start": ({"structured_outputs": {"grammar": "nonsense"}}, "structured_outputs", ""),
    "a tool's schema": (
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "objekt"}}}],
            "tool_choice": "required",
        },
        "tools",
        "objekt",
    ),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", BAD_FORMS)
def test_a_form_that_cannot_be_is_refused(model_client: openai.OpenAI, name: str, stream: bool) -> None:
    body, param, words = BAD_FORMS[name]
    with pytest.raises(openai.BadRequestError) as caught:
        model_client.chat.completions.create(**BODY, stream=stream, extra_body=body)
    assert caught.value.param is not None
    assert caught.value.param.split(".")[0].split("[")[0] == param
    assert words in caught.value.message


def test_limits_that_leave_no_token_of_a_form_are_the_callers_mistake(model_client: openai.OpenAI) -> None:
    body = {"structured_outputs": {"choice": ["yes"]}, "allowed_token_ids": [5, 6, 7]}
    with pytest.raises(openai.BadRequestError, match="no token is left to go on with"):
        model_client.chat.completions.create(**BODY, extra_body=body)


LARGE = {
    "a schema of a megabyte": schema({"enum": [f"{number:0100d}" for number in range(10_000)]}),
    "a regex that explodes": {"guided_regex": "((a{1000}){1000}){1000}"},
    "nested repetitions": {"guided_regex": "(((a?b?){1,200}c){1,200}d){1,200}"},
}


@pytest.mark.parametrize("name", LARGE)
def test_what_is_large_is_refused_or_runs_and_the_worker_goes_on(model_client: openai.OpenAI, name: str) -> None:
    with contextlib.suppress(openai.BadRequestError):
        answer = model_client.chat.completions.create(**{**BODY, "max_tokens": 3}, extra_body=LARGE[name])
        assert answer.choices[0].finish_reason == "length"
    choice = model_client.chat.completions.create(**BODY, extra_body=FORMS["structured choice"].body).choices[0]
    assert choice.message.content in CHOICE


def test_every_line_of_a_batch_keeps_its_form(model_client: openai.OpenAI) -> None:
    tools = {
        "add": {"tools": [ADD, PAINT], "tool_choice": named(ADD)},
        "paint": {"tools": [PAINT], "tool_choice": "required", "parallel_tool_calls": False},
    }
    refused = {f"bad {name}": body for name, (body, _, _) in BAD_FORMS.items()}
    bodies = {name: form.body for name, form in FORMS.items()} | tools | refused
    content = "".join(
        json.dumps({"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": BODY | body}) + "\n"
        for name, body in bodies.items()
    )
    file = model_client.files.create(file=("lines.jsonl", content.encode()), purpose="batch")
    created = model_client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    batch = wait(model_client, created.id)
    answers = {
        line["custom_id"]: line["response"]["body"]["choices"][0]
        for line in results(model_client, batch.output_file_id)
    }
    assert set(answers) == {*FORMS, *tools}
    for name, form in FORMS.items():
        form.check(answers[name]["message"]["content"])
    for name, model in (("add", AddNumbers), ("paint", Paint)):
        [call] = answers[name]["message"]["tool_calls"]
        assert model.model_validate_json(call["function"]["arguments"])
    errors = {line["custom_id"]: line["response"] for line in results(model_client, batch.error_file_id)}
    assert {name: response["status_code"] for name, response in errors.items()} == dict.fromkeys(refused, 400)
