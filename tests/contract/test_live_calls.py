"""Live calls at the edges of what the hosted service takes, through the official client."""

from typing import Any

import openai
import pytest

from tests.contract.shapes import Recorder

SAY: Any = [{"role": "user", "content": "hello"}]


def test_an_unknown_model_is_refused_as_by_the_hosted_service(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="nobody", messages=SAY)
    assert (caught.value.type, caught.value.code, caught.value.param) == (
        "invalid_request_error",
        "model_not_found",
        "model",
    )
    assert "`nobody` does not exist" in caught.value.message


def test_an_empty_name_of_a_model_is_named_as_such(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="Invalid 'model': empty string") as caught:
        client.chat.completions.create(model="", messages=SAY)
    assert (caught.value.code, caught.value.param) == ("empty_string", "model")


@pytest.mark.parametrize("values", [{"n": 1.0}, {"max_tokens": 4.0}, {"seed": 7.0}, {"top_p": 0}, {"top_p": 0.0}])
def test_numbers_may_be_written_either_way(client: openai.OpenAI, values: dict[str, Any]) -> None:
    answer = client.chat.completions.create(model="m", messages=SAY, extra_body=values)
    assert answer.choices[0].message.content == "hello"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"n": 1.5}, "expected an integer, but got a decimal"),
        ({"max_tokens": "4"}, "expected an integer, but got a string"),
        ({"top_p": -0.1}, "Expected a value >= 0, but got -0.1"),
        ({"top_p": 1.1}, "Expected a value <= 1, but got 1.1"),
    ],
)
def test_others_are_refused(client: openai.OpenAI, values: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        client.chat.completions.create(model="m", messages=SAY, extra_body=values)
    assert caught.value.param == next(iter(values))


@pytest.mark.parametrize("prompt", [None, "", "text"])
def test_a_prompt_may_be_empty(client: openai.OpenAI, prompt: Any) -> None:
    assert client.completions.create(model="m", prompt=prompt).choices[0].finish_reason == "length"


def test_messages_are_no_prompt(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="Missing required parameter: 'prompt'"):
        client.completions.create(model="m", prompt=None, extra_body={"messages": SAY})  # type: ignore[call-overload]


def test_a_functions_answer_is_a_message(client: openai.OpenAI, recorder: Recorder) -> None:
    called: Any = {"role": "function", "name": "f", "content": "6"}
    assert client.chat.completions.create(model="m", messages=[*SAY, called]).choices[0].message.content == "6"
    assert recorder.checked == 1
