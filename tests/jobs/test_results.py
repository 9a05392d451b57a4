"""Bodies, chunks and result lines are what the official client's types say."""

import json

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from jobs.results import (
    ApiError,
    Result,
    Usage,
    batch_request_id,
    chat_body,
    chat_chunk,
    completion_body,
    completion_chunk,
    encode_json,
    new_body_id,
    new_request_id,
    output_line,
    response_body,
    unanswered_line,
    usage_chunk,
)

USAGE = Usage(prompt_tokens=7, completion_tokens=5, cached_tokens=4)
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def strictly(model, body):  # type: ignore[no-untyped-def]
    """Validated as it would be after a trip over the wire: every required field there, of its type."""
    return model.model_validate_json(encode_json(body), strict=True)


def test_chat_body() -> None:
    body = chat_body(new_body_id(CHAT), "m", "hello", "stop", "\n", USAGE, 1_700_000_000)
    parsed = strictly(ChatCompletion, body)
    assert parsed.id.startswith("chatcmpl-")
    assert parsed.choices[0].message.content == "hello"
    assert (parsed.choices[0].finish_reason, parsed.choices[0].logprobs) == ("stop", None)
    assert parsed.usage.total_tokens == 12
    assert parsed.usage.prompt_tokens_details.cached_tokens == 4
    assert body["choices"][0]["stop_reason"] == "\n"
    assert response_body(CHAT, body["id"], "m", "hello", "stop", "\n", USAGE, 1_700_000_000) == body


def test_completion_body() -> None:
    body = completion_body(new_body_id(COMPLETIONS), "m", "hello", "length", None, USAGE, 1_700_000_000)
    parsed = strictly(Completion, body)
    assert parsed.id.startswith("cmpl-")
    assert (parsed.choices[0].text, parsed.choices[0].finish_reason) == ("hello", "length")
    assert parsed.usage.prompt_tokens == 7


def test_chat_chunks() -> None:
    first = strictly(ChatCompletionChunk, chat_chunk("chatcmpl-1", "m", None, None, 1, first=True))
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    middle = strictly(ChatCompletionChunk, chat_chunk("chatcmpl-1", "m", "hi", None, 1))
    assert (middle.choices[0].delta.content, middle.choices[0].finish_reason) == ("hi", None)
    last = strictly(ChatCompletionChunk, chat_chunk("chatcmpl-1", "m", None, "stop", 1, stop_reason=5))
    assert (last.choices[0].delta.content, last.choices[0].finish_reason) == (None, "stop")
    usage = strictly(ChatCompletionChunk, usage_chunk(CHAT, "chatcmpl-1", "m", USAGE, 1))
    assert (usage.choices, usage.usage.completion_tokens) == ([], 5)


def test_completion_chunks() -> None:
    body = completion_chunk("cmpl-1", "m", "hi", None, 1)
    assert body["choices"][0]["finish_reason"] is None
    last = strictly(Completion, completion_chunk("cmpl-1", "m", "", "stop", 1))
    assert last.choices[0].finish_reason == "stop"
    assert strictly(Completion, usage_chunk(COMPLETIONS, "cmpl-1", "m", USAGE, 1)).usage.total_tokens == 12


def test_output_line_of_a_success() -> None:
    result = Result(200, encode_json(chat_body("chatcmpl-1", "m", "é\n", "stop", None, USAGE, 1)), USAGE, "req_1")
    line = json.loads(output_line("my id ☃", result, batch_request_id("batch_abc", 17)))
    assert list(line) == ["id", "custom_id", "response", "error"]
    assert (line["id"], line["custom_id"], line["error"]) == ("batch_req_abc_17", "my id ☃", None)
    assert (line["response"]["status_code"], line["response"]["request_id"]) == (200, "req_1")
    assert ChatCompletion.model_validate(line["response"]["body"]).choices[0].message.content == "é\n"


def test_output_line_of_an_error_says_it_twice() -> None:
    error = ApiError(400, "too long", param="messages", code="context_length_exceeded")
    line = json.loads(output_line("a", error.result("req_1"), "batch_req_1"))
    assert line["response"]["status_code"] == 400
    assert line["response"]["body"] == {
        "error": {"message": "too long", "type": "invalid_request_error", "param": "messages", "code": "context_length_exceeded"}
    }
    assert line["error"] == {"code": "context_length_exceeded", "message": "too long"}


def test_an_error_without_code_still_has_one_in_its_line() -> None:
    line = json.loads(output_line("a", ApiError(500, "broken", "server_error").result("req_1"), "batch_req_1"))
    assert line["error"] == {"code": "server_error", "message": "broken"}


def test_unanswered_line() -> None:
    assert json.loads(unanswered_line("a", "batch_cancelled", "The batch was cancelled.", "batch_req_1")) == {
        "id": "batch_req_1",
        "custom_id": "a",
        "response": None,
        "error": {"code": "batch_cancelled", "message": "The batch was cancelled."},
    }


@pytest.mark.parametrize("text", ["\ud800", "a\udfff", "\x00", "\u2028", "😀"])
def test_every_text_can_be_written(text: str) -> None:
    assert json.loads(encode_json({"a": text})) == {"a": text}


def test_ids_differ() -> None:
    assert len({new_request_id() for _ in range(100)} | {new_body_id(CHAT) for _ in range(100)}) == 200
    assert Result(399, b"", USAGE, "").succeeded
    assert not Result(400, b"", USAGE, "").succeeded
