"""Files that are refused: the batch is made and then fails, with an entry for every bad line."""

import json
from typing import Any

import openai
import pytest
from openai.types import Batch

from tests.contract.calls import CHAT, COMPLETIONS, WINDOW, lines, submit, wait
from tests.support.batch_stack import BatchStack
from tests.support.control_plane import chat_line

Entry = tuple[str | None, int | None, str | None]  # code, line, param
GOOD = chat_line("good", "hi")
SAY = [{"role": "user", "content": "a"}]


def line(body: Any = None, **change: Any) -> bytes:
    """A chat line with some fields changed, or left out by None."""
    whole = {"custom_id": "x", "method": "POST", "url": CHAT, "body": body or {"model": "m", "messages": SAY}}
    return (
        json.dumps({name: value for name, value in {**whole, **change}.items() if value is not None}).encode() + b"\n"
    )


FILES: dict[str, tuple[bytes, list[Entry]]] = {
    "no json": (GOOD + b"{nonsense\n" + b"[]\n", [("invalid_json_line", 2, None), ("invalid_json_line", 3, None)]),
    "no custom_id": (GOOD + line(custom_id=None), [("missing_required_parameter", 2, "custom_id")]),
    "no method": (line(method=None), [("missing_required_parameter", 1, "method")]),
    "no url": (line(url=None), [("missing_required_parameter", 1, "url")]),
    "no body": (
        b'{"custom_id": "x", "method": "POST", "url": "/v1/chat/completions"}\n',
        [("missing_required_parameter", 1, "body")],
    ),
    "another url": (line(url=COMPLETIONS), [("invalid_url", 1, "url")]),
    "a stream": (line({"model": "m", "messages": SAY, "stream": True}), [("streaming_unsupported", 1, "body.stream")]),
    "an unknown model": (line({"model": "nobody", "messages": SAY}), [("model_not_found", 1, "body.model")]),
    "no model": (line({"messages": SAY}), [("invalid_request", 1, "body.model")]),
    "no messages": (line({"model": "m"}), [("invalid_request", 1, "body.messages")]),
    "messages that are none": (line({"model": "m", "messages": "hi"}), [("invalid_request", 1, "body.messages")]),
    "one id twice": (chat_line("a") + chat_line("b") + chat_line("a"), [("duplicate_custom_id", 3, "custom_id")]),
    "blank lines only": (b"\n\n", [("empty_file", None, None)]),
    "many kinds": (
        GOOD + b"{\n" + line(url="/v1/else") + line(method=None, custom_id="y"),
        [("invalid_json_line", 2, None), ("invalid_url", 3, "url"), ("missing_required_parameter", 4, "method")],
    ),
}
HOSTED = {
    "no json": "This line is not parseable as valid JSON.",
    "no custom_id": "Missing required parameter: 'custom_id'.",
    "no body": "Missing required parameter: 'body'.",
    "another url": "The URL provided for this request does not match the batch endpoint.",
    "a stream": "Chat Completions: Streaming is not supported in the Batch API.",
    "an unknown model": "The provided model 'nobody' is not supported by the Batch API.",
    "no model": "Model parameter is required.",
    "no messages": "Messages parameter is required.",
    "one id twice": "The custom_id 'a' for this request is a duplicate of another request. The custom_id parameter"
    " must be unique for each request in a batch.",
    "blank lines only": "The input file is empty. Please ensure that your batch contains at least one request.",
}
"""How the sentences begin that the hosted service has for them."""


@pytest.fixture(scope="module")
def failed(module_client: openai.OpenAI) -> dict[str, Batch]:
    """All of them, made at once."""
    made = {name: submit(module_client, content) for name, (content, _) in FILES.items()}
    return {name: wait(module_client, batch.id) for name, batch in made.items()}


@pytest.mark.parametrize("name", FILES)
def test_each_bad_line_has_its_entry(failed: dict[str, Batch], name: str) -> None:
    assert entries(failed[name]) == FILES[name][1]


@pytest.mark.parametrize("name", HOSTED)
def test_a_message_begins_as_the_hosted_services(failed: dict[str, Batch], name: str) -> None:
    assert messages(failed[name])[0].startswith(HOSTED[name])


def test_a_stream_of_completions_is_named_after_its_endpoint(client: openai.OpenAI) -> None:
    body = {"model": "m", "prompt": "a", "stream": True}
    batch = wait(client, submit(client, line(body, url=COMPLETIONS), endpoint=COMPLETIONS).id)
    assert messages(batch)[0].startswith("Completions: Streaming is not supported in the Batch API.")


def test_what_a_failed_batch_looks_like(failed: dict[str, Batch]) -> None:
    for batch in failed.values():
        assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
        assert batch.failed_at is not None
        assert batch.in_progress_at is None


def test_after_a_thousand_entries_comes_a_note(client: openai.OpenAI) -> None:
    batch = wait(client, submit(client, GOOD + b"{\n" * 1500).id)
    found = entries(batch)
    assert found[:1000] == [("invalid_json_line", number, None) for number in range(2, 1002)]
    assert len(found) == 1001
    assert found[1000][1:] == (None, None)


@pytest.mark.parametrize(
    "file_id", ["file-0123456789abcdef01234567", "nonsense", "batch_0123456789abcdef01234567", "../../etc/passwd"]
)
def test_an_unknown_file_fails_the_batch(client: openai.OpenAI, file_id: str) -> None:
    batch = client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window=WINDOW)
    assert (batch.status, batch.input_file_id) == ("validating", file_id)
    batch = wait(client, batch.id)
    assert entries(batch) == [("invalid_request", None, "file_id")]
    said = f"Cannot find file {file_id}, or organization default does not have access to it."
    assert messages(batch)[0].startswith(said)


def test_a_file_for_another_purpose_fails_it_too(client: openai.OpenAI) -> None:
    file_id = client.files.create(file=("input.jsonl", lines("one")), purpose="user_data").id
    batch = client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window=WINDOW)
    assert entries(wait(client, batch.id)) == [("invalid_request", None, "file_id")]


def test_blank_lines_do_not_count_but_keep_their_numbers(client: openai.OpenAI) -> None:
    batch = wait(client, submit(client, b"\n" + lines("one") + b"\n\n").id)
    assert (batch.status, batch.request_counts and batch.request_counts.total) == ("completed", 1)
    assert entries(wait(client, submit(client, b"\n" + GOOD + b"\r\n{\n").id)) == [("invalid_json_line", 4, None)]


def test_a_model_without_a_worker_is_accepted(client: openai.OpenAI, stack: BatchStack) -> None:
    batch = submit(client, chat_line("a", model="away"))
    assert wait(client, batch.id, "in_progress", "failed").status == "in_progress"
    client.batches.cancel(batch.id)


def entries(batch: Batch) -> list[Entry]:
    """What `errors` reports, without its words."""
    assert batch.status == "failed", batch
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert all(entry.message for entry in batch.errors.data)
    return [(entry.code, entry.line, entry.param) for entry in batch.errors.data]


def messages(batch: Batch) -> list[str]:
    """The words of `errors`."""
    return [entry.message or "" for entry in (batch.errors and batch.errors.data) or ()]
