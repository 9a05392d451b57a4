"""Batches that run to their end: what creating gives, result lines, counts, usage, and what a
create can do wrong.
"""

import json
import re
import time
import uuid
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch
from openai.types.chat import ChatCompletion

from api import answer_objects
from tests.contract.calls import CHAT, COMPLETIONS, WINDOW, lines, results, said, submit, upload, wait
from tests.contract.shapes import Recorder, body_faults
from tests.contract.test_files import refused
from tests.support.control_plane import chat_line

DAY = 24 * 3600
COMPLETION_LINE = {"custom_id": "c1", "method": "POST", "url": COMPLETIONS, "body": {"model": "m", "prompt": "Once"}}
MIXED = lines("one", "fail 429", "three", "fail 500", "five")


@pytest.fixture(scope="module")
def ended(module_client: openai.OpenAI) -> dict[str, Batch]:
    """Batches that were made at once and have ended."""
    client = module_client
    made = {
        "good": submit(client, lines("one", "two", "three"), metadata={"team": "blue"}),
        "completions": submit(client, json.dumps(COMPLETION_LINE).encode(), endpoint=COMPLETIONS),
        "mixed": submit(client, MIXED),
        "all fail": submit(client, lines("fail 400", "fail 400")),
        "short-lived": submit(client, MIXED, output_expires_after={"anchor": "created_at", "seconds": 3600}),
    }
    return {name: wait(client, batch.id) for name, batch in made.items()}


def test_a_batch_begins_with_all_its_fields(client: openai.OpenAI) -> None:
    before = int(time.time())
    file_id = upload(client, lines("one"))
    metadata = {f"key {number}": "v" * 512 for number in range(15)} | {"k" * 64: ""}
    batch = client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window=WINDOW, metadata=metadata)
    assert batch.id.startswith("batch_")
    assert (batch.status, batch.object, batch.endpoint, batch.input_file_id) == ("validating", "batch", CHAT, file_id)
    assert (batch.completion_window, batch.metadata) == (WINDOW, metadata)
    assert before <= batch.created_at <= time.time()
    assert batch.expires_at == batch.created_at + DAY
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (0, 0, 0)
    assert (batch.output_file_id, batch.error_file_id, batch.errors) == (None, None, None)
    assert client.batches.retrieve(batch.id).metadata == metadata


def test_a_create_that_is_repeated_gives_the_same_batch(client: openai.OpenAI) -> None:
    body: Any = {"input_file_id": upload(client, lines("one")), "endpoint": CHAT, "completion_window": WINDOW}
    headers = {"Idempotency-Key": str(uuid.uuid4())}
    first = client.batches.create(**body, extra_headers=headers)
    again = client.batches.with_raw_response.create(**body, extra_headers=headers)
    assert again.parse() == first
    assert again.headers["idempotent-replayed"] == "true"
    with pytest.raises(openai.UnprocessableEntityError):
        client.batches.create(**body, metadata={"team": "blue"}, extra_headers=headers)
    assert client.batches.create(**body).id != first.id


def test_it_moves_forward_to_its_end(client: openai.OpenAI, recorder: Recorder) -> None:
    batch = submit(client, lines(*map(str, range(50))))
    assert wait(client, batch.id).status == "completed"
    assert recorder.states[batch.id][0] == "validating"
    assert recorder.states[batch.id][-1] == "completed"


def test_every_line_is_answered_in_the_order_of_the_input(client: openai.OpenAI, ended: dict[str, Batch]) -> None:
    batch = ended["good"]
    assert (batch.status, batch.model, batch.metadata) == ("completed", "m", {"team": "blue"})
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (3, 3, 0)
    assert batch.error_file_id is None
    found = results(client, batch.output_file_id)
    assert [(line["custom_id"], said(line)) for line in found] == [("c1", "one"), ("c2", "two"), ("c3", "three")]
    for line in found:
        assert set(line) == {"id", "custom_id", "response", "error"}
        assert line["id"].startswith("batch_req_")
        assert line["error"] is None
        assert set(line["response"]) == {"status_code", "request_id", "body"}
        assert line["response"]["status_code"] == 200
        assert line["response"]["request_id"]
        ChatCompletion.model_validate_json(json.dumps(line["response"]["body"]), strict=True)
    assert len({line["id"] for line in found}) == 3


def test_tokens_of_all_lines_are_counted(ended: dict[str, Batch]) -> None:
    usage = ended["good"].usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (21, 9, 30)
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (6, 3)
    assert getattr(usage, "device_seconds") == 0.75  # noqa: B009 - beyond OpenAI's, whose client keeps it


def test_completions_are_served_as_well(client: openai.OpenAI, ended: dict[str, Batch]) -> None:
    assert ended["completions"].endpoint == COMPLETIONS
    assert [
        line["response"]["body"]["choices"][0]["text"] for line in results(client, ended["completions"].output_file_id)
    ] == ["Once"]


def test_result_files_are_files(client: openai.OpenAI, ended: dict[str, Batch]) -> None:
    batch = ended["mixed"]
    for kind, file_id in (("output", batch.output_file_id), ("error", batch.error_file_id)):
        assert file_id is not None
        file = client.files.retrieve(file_id)
        content = client.files.with_raw_response.content(file_id)
        assert (file.purpose, file.status, file.filename) == ("batch_output", "processed", f"{batch.id}_{kind}.jsonl")
        assert file.bytes == len(content.content)
        assert file.filename in content.headers["content-disposition"]
        assert batch.completed_at is not None
        assert file.expires_at is not None
        assert abs(file.expires_at - batch.completed_at - 30 * DAY) <= 60
        assert file_id in [listed.id for listed in client.files.list(purpose="batch_output")]
    assert batch.input_file_id not in [listed.id for listed in client.files.list(purpose="batch_output")]


def test_results_expire_when_their_owner_says(client: openai.OpenAI, ended: dict[str, Batch]) -> None:
    batch = ended["short-lived"]
    for file_id in (batch.output_file_id, batch.error_file_id):
        file = client.files.retrieve(file_id or "")
        assert file.expires_at is not None
        assert abs(file.expires_at - file.created_at - 3600) <= 60


def test_a_request_that_failed_says_so_in_both_places(client: openai.OpenAI, ended: dict[str, Batch]) -> None:
    batch = ended["mixed"]
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (5, 3, 2)
    assert [line["custom_id"] for line in results(client, batch.output_file_id)] == ["c1", "c3", "c5"]
    failed = results(client, batch.error_file_id)
    assert [(line["custom_id"], line["response"]["status_code"]) for line in failed] == [("c2", 429), ("c4", 500)]
    for line in failed:
        assert set(line["response"]["body"]["error"]) == {"message", "type", "param", "code"}
        assert line["response"]["body"]["error"]["code"] == "bad_luck"
        assert line["error"] == {"code": "bad_luck", "message": "no such luck"}


def test_a_batch_whose_every_line_failed_is_completed(client: openai.OpenAI, ended: dict[str, Batch]) -> None:
    batch = ended["all fail"]
    assert (batch.status, batch.output_file_id) == ("completed", None)
    assert [line["custom_id"] for line in results(client, batch.error_file_id)] == ["c1", "c2"]


def test_no_character_breaks_a_line_of_results(client: openai.OpenAI) -> None:
    """`results` reads lines by `splitlines`, as many do, which takes more than a line feed for an
    end.
    """
    odd = "".join(map(chr, (*range(1, 0x20), 0x7F, 0x85, 0x2028, 0x2029))) + "🙂é"
    batch = wait(client, submit(client, chat_line(odd, odd) + chat_line(f"bad {odd}", "fail 400")).id)
    assert [(line["custom_id"], said(line)) for line in results(client, batch.output_file_id)] == [(odd, odd)]
    assert [line["custom_id"] for line in results(client, batch.error_file_id)] == [f"bad {odd}"]


def test_deleting_the_input_does_not_hurt_a_batch(client: openai.OpenAI) -> None:
    batch = submit(client, lines("one", "two"))
    client.files.delete(batch.input_file_id)
    assert wait(client, batch.id).status == "completed"


def test_one_file_serves_many_batches(client: openai.OpenAI) -> None:
    file_id = upload(client, lines("one"))
    made = [client.batches.create(input_file_id=file_id, endpoint=CHAT, completion_window=WINDOW) for _ in range(3)]
    outputs = {wait(client, batch.id).output_file_id for batch in made}
    assert len(outputs) == 3


def test_null_is_as_good_as_nothing(http: httpx.Client, client: openai.OpenAI) -> None:
    wanted = {"input_file_id": upload(client, lines("one")), "endpoint": CHAT, "completion_window": WINDOW}
    nothing = {"metadata": None, "priority": None, "output_expires_after": None, "colour": "blue"}
    answer = http.post("/v1/batches", json={**wanted, **nothing}, params={"shade": "dark"})
    assert answer.status_code == 200, answer.text
    assert body_faults(answer_objects.Batch, answer.content) == []
    assert answer.json()["metadata"] is None


WANTED = {"input_file_id": "file-0123456789abcdef01234567", "endpoint": CHAT, "completion_window": WINDOW}
EXPIRY = {"anchor": "created_at", "seconds": 3600}
CREATES: list[tuple[dict[str, Any], str, str]] = [
    ({"input_file_id": None}, "input_file_id", "missing_required_parameter"),
    ({"endpoint": None}, "endpoint", "missing_required_parameter"),
    ({"completion_window": None}, "completion_window", "missing_required_parameter"),
    ({"input_file_id": 7}, "input_file_id", "invalid_type"),
    ({"endpoint": []}, "endpoint", "invalid_type"),
    ({"endpoint": "/v1/embeddings/of/none"}, "endpoint", "invalid_value"),
    ({"endpoint": ""}, "endpoint", "invalid_value"),
    ({"completion_window": "1h"}, "completion_window", "invalid_value"),
    ({"completion_window": "48h"}, "completion_window", "invalid_value"),
    ({"completion_window": ""}, "completion_window", "invalid_value"),
    ({"completion_window": 24}, "completion_window", "invalid_type"),
    ({"metadata": "blue"}, "metadata", "invalid_type"),
    ({"metadata": {"tags": ["a"]}}, "metadata.tags", "invalid_type"),
    ({"metadata": {"age": 7}}, "metadata.age", "invalid_type"),
    ({"metadata": {"none": None}}, "metadata.none", "invalid_type"),
    ({"metadata": {str(number): "" for number in range(17)}}, "metadata", "object_above_max_properties"),
    ({"metadata": {"k" * 65: ""}}, "metadata", "string_above_max_length"),
    ({"metadata": {"long": "v" * 513}}, "metadata.long", "string_above_max_length"),
    ({"priority": 101}, "priority", "integer_above_max_value"),
    ({"priority": -101}, "priority", "integer_below_min_value"),
    ({"priority": "high"}, "priority", "invalid_type"),
    ({"priority": 0.5}, "priority", "invalid_type"),
    ({"priority": True}, "priority", "invalid_type"),
    ({"output_expires_after": 3600}, "output_expires_after", "invalid_type"),
    ({"output_expires_after": {"anchor": "created_at"}}, "output_expires_after.seconds", "missing_required_parameter"),
    ({"output_expires_after": {"seconds": 3600}}, "output_expires_after.anchor", "missing_required_parameter"),
    ({"output_expires_after": {**EXPIRY, "anchor": "now"}}, "output_expires_after.anchor", "invalid_value"),
    ({"output_expires_after": {**EXPIRY, "seconds": 3599}}, "output_expires_after.seconds", "integer_below_min_value"),
    (
        {"output_expires_after": {**EXPIRY, "seconds": 2592001}},
        "output_expires_after.seconds",
        "integer_above_max_value",
    ),
    ({"output_expires_after": {**EXPIRY, "seconds": "3600"}}, "output_expires_after.seconds", "invalid_type"),
    ({"output_expires_after": {**EXPIRY, "seconds": 3600.5}}, "output_expires_after.seconds", "invalid_type"),
]


@pytest.mark.parametrize(("change", "param", "code"), CREATES, ids=[json.dumps(case[0])[:50] for case in CREATES])
def test_a_create_names_what_is_wrong_with_it(
    http: httpx.Client, change: dict[str, Any], param: str, code: str
) -> None:
    error = refused(
        http.post(
            "/v1/batches", json={name: value for name, value in {**WANTED, **change}.items() if value is not None}
        )
    )
    assert error["param"].startswith(param)
    assert error["code"] == code


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'"text"', b"\xff", b"[" * 100_000, b'{"endpoint": "\\ud800"}']
)
def test_a_create_that_is_no_object_is_refused(http: httpx.Client, body: bytes) -> None:
    refused(http.post("/v1/batches", content=body, headers={"content-type": "application/json"}))


@pytest.mark.parametrize(
    "batch_id",
    [
        "batch_",
        "batch_0123456789abcdef01234567",
        "file-0123456789abcdef01234567",
        "..",
        "batch_%00",
        "batch_%2e%2e%2f",
        "x" * 5000,
        "é",
    ],
)
@pytest.mark.parametrize(("method", "end"), [("GET", ""), ("POST", "/cancel"), ("DELETE", ""), ("POST", "/retry")])
def test_ids_of_no_batch_are_unknown(http: httpx.Client, batch_id: str, method: str, end: str) -> None:
    answer = http.request(method, f"/v1/batches/{batch_id}{end}")
    assert answer.status_code in (404, 405), answer.text
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_an_unknown_batch_gets_the_error_of_the_hosted_service(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.batches.retrieve("batch_0123456789abcdef01234567")
    assert re.search("no batch found|not found", str(caught.value).lower())


def test_other_methods_are_not_allowed(http: httpx.Client, ended: dict[str, Batch]) -> None:
    batch = f"/v1/batches/{ended['good'].id}"
    for method, path in (("PATCH", batch), ("PUT", "/v1/files"), ("GET", f"{batch}/cancel")):
        answer = http.request(method, path)
        assert answer.status_code == 405, path
        assert answer.json()["error"]["code"] == "method_not_allowed"


def test_the_failed_lines_of_a_batch_are_retried(client: openai.OpenAI, ended: dict[str, Batch]) -> None:
    batch = ended["mixed"]
    again = client.post(f"/batches/{batch.id}/retry", cast_to=Batch)
    assert (again.status, again.metadata) == ("validating", {"retry_of": batch.id})
    assert client.files.content(again.input_file_id).content == b"".join(
        MIXED.splitlines(keepends=True)[number] for number in (1, 3)
    )
    done = wait(client, again.id)
    assert done.request_counts is not None
    assert (done.request_counts.completed, done.request_counts.failed) == (0, 2)
    assert [line["custom_id"] for line in results(client, done.error_file_id)] == ["c2", "c4"]
    with pytest.raises(openai.BadRequestError, match="nothing to retry"):
        client.post(f"/batches/{ended['good'].id}/retry", cast_to=Batch)


def test_an_ended_batch_is_deleted_and_its_files_are_not(client: openai.OpenAI) -> None:
    batch = wait(client, submit(client, MIXED).id)
    gone: Any = client.delete(f"/batches/{batch.id}", cast_to=object)
    assert gone == {"id": batch.id, "object": "batch", "deleted": True}
    for call in (client.batches.retrieve, client.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            call(batch.id)
    assert batch.id not in [one.id for one in client.batches.list()]
    assert len(results(client, batch.output_file_id)) + len(results(client, batch.error_file_id)) == 5
    assert client.files.retrieve(batch.input_file_id).purpose == "batch"
