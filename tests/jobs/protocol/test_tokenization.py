"""Calls for the tokenizer alone: how they are read, and that the schema says the same."""

import itertools
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from jobs.protocol.endpoints import TOKENIZER_ENDPOINTS, urls_for
from jobs.protocol.results import ApiError
from jobs.protocol.tokenization import DETOKENIZE, TOKENIZE, DetokenizeCall, TokenizeCall, TokenizerCall
from jobs.protocol.validation import LineError, body_schema, check_line

USER: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
ASSISTANT: list[dict[str, Any]] = [*USER, {"role": "assistant", "content": "y"}]
TOOL = {"type": "function", "function": {"name": "f"}}
VALUES: dict[str, list[Any]] = {
    "prompt": [None, "", "x", 5, ["x"]],
    "messages": [None, USER, ASSISTANT, [], "x"],
    "add_special_tokens": [None, True, "x"],
    "return_token_strs": [None, True, 1],
    "tools": [None, [TOOL], [{}]],
    "chat_template_kwargs": [None, {"a": 1}, {"tools": 1}],
    "chat_template": [None, "{{ 1 }}"],
}


def read(url: str, default_model: str | None = None, **body: Any) -> TokenizerCall:
    return TOKENIZER_ENDPOINTS[url].read(body, default_model)


def refused(url: str, **body: Any) -> tuple[str | None, str | None]:
    with pytest.raises(ApiError) as caught:
        read(url, **body)
    assert caught.value.status == 400
    return caught.value.param, caught.value.code


def test_a_text_has_special_tokens_and_a_chat_those_of_its_template() -> None:
    text, chat = read(TOKENIZE, model="m", prompt="x"), read(TOKENIZE, model="m", messages=USER)
    assert isinstance(text, TokenizeCall)
    assert isinstance(chat, TokenizeCall)
    assert (text.prompt, text.add_special_tokens, text.return_token_strs) == ("x", True, False)
    assert (chat.messages, chat.add_special_tokens, chat.add_generation_prompt) == (USER, False, True)
    asked = read(TOKENIZE, model="m", messages=ASSISTANT, continue_final_message=True, add_special_tokens=True)
    assert isinstance(asked, TokenizeCall)
    assert (asked.add_generation_prompt, asked.continue_final_message, asked.add_special_tokens) == (False, True, True)


def test_tokens_are_ids() -> None:
    call = read(DETOKENIZE, model="m", tokens=[1, 2.0])
    assert isinstance(call, DetokenizeCall)
    assert list(call.tokens) == [1, 2]
    assert refused(DETOKENIZE, model="m", tokens=[1, "2"]) == ("tokens[1]", "invalid_type")
    assert refused(DETOKENIZE, model="m", tokens=[-1]) == ("tokens[0]", "integer_below_min_value")
    assert refused(DETOKENIZE, model="m") == ("tokens", "missing_required_parameter")


def test_a_call_without_a_model_is_for_the_default() -> None:
    assert read(TOKENIZE, "served", prompt="x").model == "served"
    assert read(TOKENIZE, "served", prompt="x", model="m").model == "m"
    assert refused(TOKENIZE, prompt="x") == ("model", "missing_required_parameter")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "messages": USER}, "prompt"),
        ({"messages": USER, "continue_final_message": True}, "continue_final_message"),
        (
            {"messages": ASSISTANT, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ({"messages": USER, "chat_template": "{{ messages }}"}, "chat_template"),
        ({"prompt": "x" * (4 * 2**20 + 1)}, "prompt"),
    ],
)
def test_what_contradicts_itself_is_refused(body: dict[str, Any], param: str) -> None:
    assert refused(TOKENIZE, model="m", **body)[0] == param


def test_a_body_is_taken_where_the_schema_takes_it() -> None:
    validator, taken = Draft202012Validator(body_schema(TOKENIZE)), 0
    for values in itertools.product(*VALUES.values()):
        body = {"model": "m", **dict(zip(VALUES, values, strict=True))}
        try:
            read(TOKENIZE, **body)
            found = True
        except ApiError:
            found = False
        assert found == validator.is_valid(body), body
        taken += found
    assert taken > 20


def test_a_line_of_a_batch_cannot_be_one() -> None:
    line = b'{"custom_id": "a", "method": "POST", "url": "/tokenize", "body": {"model": "m", "prompt": "x"}}'
    found = check_line(line, 1)
    assert isinstance(found, LineError)
    assert (found.code, found.param) == ("invalid_url", "url")
    start = "The URL provided for this request is for live calls alone. Expected one of /v1/chat/completions, "
    assert found.message.startswith(start)


def test_a_worker_that_has_no_tokenizer_for_calls_has_no_such_endpoints() -> None:
    assert urls_for(["generate"]) == ["/v1/chat/completions", "/v1/completions"]
    assert urls_for(["tokenize"]) == [TOKENIZE, DETOKENIZE]
