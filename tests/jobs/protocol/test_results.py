"""Result lines are what the official client's types say."""

import json

import msgspec
import pytest
from openai.types.chat import ChatCompletion

from jobs.protocol.chat import CHAT
from jobs.protocol.endpoint import AnswerHead
from jobs.protocol.endpoints import ENDPOINTS
from jobs.protocol.results import (
    ApiError,
    Choice,
    Result,
    Usage,
    batch_request_id,
    encode_json,
    new_request_id,
    output_line,
    unanswered_line,
)

USAGE = Usage(prompt_tokens=7, completion_tokens=5, cached_tokens=4)


def test_output_line_of_a_success() -> None:
    body = ENDPOINTS[CHAT].body(AnswerHead("chatcmpl-1", "m", 1), [Choice(0, "é\n", "stop")], USAGE)
    result = Result(200, encode_json(body), USAGE, "req_1")
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
        "error": {
            "message": "too long",
            "type": "invalid_request_error",
            "param": "messages",
            "code": "context_length_exceeded",
        }
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


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("\x00", "\x00"),
        ("\u2028", "\u2028"),
        ("😀", "😀"),
        ("\ud800", "\ufffd"),
        ("a\udfffb", "a\ufffdb"),
        ("😀\ud83d", "😀\ufffd"),
    ],
)
def test_every_text_can_be_written_for_strict_readers(text: str, read: str) -> None:
    assert msgspec.json.decode(encode_json({"a": text})) == {"a": read}


def test_ids_differ() -> None:
    assert len({new_request_id() for _ in range(100)}) == 100
    assert Result(399, b"", USAGE, "").succeeded
    assert not Result(400, b"", USAGE, "").succeeded
