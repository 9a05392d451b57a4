"""Open batches over HTTP: appended requests run at once, and a repeated one counts once."""

import errno
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import redis
from openai.types import Batch

from api.settings import ApiSettings
from jobs.batch.client import get_batch
from jobs.batch.rebuild import rebuild_all
from jobs.control.ticker import Ticker
from jobs.protocol.requests import Claim
from jobs.protocol.results import ApiError, Result
from jobs.queue import keys
from jobs.queue.request_queue import Queue
from jobs.store.api_keys import create_key
from jobs.store.storage import join, list_names
from tests.support.api_server import official_client, running_api
from tests.support.batch_steps import answer_all, run_to_end, step, tick
from tests.support.control_plane import chat_line, control_plane, echo
from tests.support.object_stores import PLACES, store_location
from tests.support.store_batches import lines_of, serve
from tests.support.waiting import wait_until

CHAT = "/v1/chat/completions"
BAD = b'{"custom_id": "bad", "method": "GET", "url": "/v1/chat/completions", "body": {"model": "m"}}\n'


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def settings(redis_url: str, place: str, tmp_path: Path) -> Iterator[ApiSettings]:
    """Of an API on the store of `tests.support.store_batches`, or one in a bucket."""
    with store_location(place, tmp_path) as store:
        yield ApiSettings(redis_url=redis_url, file_store=store)


in_a_folder = pytest.mark.parametrize("place", ["folder"], indirect=True)


@pytest.fixture
def api_url(settings: ApiSettings, redis_client: redis.Redis) -> Iterator[str]:
    """That API, whose queue knows the model `m`."""
    serve(redis_client, "m")
    with running_api(settings) as url:
        yield url


def begin(client: openai.OpenAI) -> Batch:
    made: Any = {"extra_body": {"input": "stream"}, "input_file_id": openai.omit}
    return client.batches.create(endpoint=CHAT, completion_window="24h", **made)


def append(client: openai.OpenAI, batch: Batch, lines: bytes) -> dict[str, Any]:
    answer: Any = client.post(f"/batches/{batch.id}/requests", cast_to=object, content=lines)
    return dict(answer)


def close(client: openai.OpenAI, batch: Batch) -> Batch:
    return client.post(f"/batches/{batch.id}/close", cast_to=Batch)


def members(batch: Batch) -> dict[str, Any]:
    return {name: batch.to_dict()[name] for name in ("input", "open", "last_append_at")}


def requests_of(batch: Batch) -> int:
    return 0 if batch.request_counts is None else batch.request_counts.total


def refusing(claim: Claim) -> Result:
    """As a worker does: a placeholder is refused."""
    if not isinstance(json.loads(claim.request.body)["messages"], list):
        return ApiError(400, "no messages").result(f"req_{claim.key.line}")
    return echo(claim)


def ids_in(client: openai.OpenAI, file_id: str | None) -> list[str]:
    assert file_id is not None
    return [json.loads(line)["custom_id"] for line in client.files.content(file_id).content.splitlines()]


def test_a_batch_is_open_runs_what_comes_and_ends_when_it_is_closed(
    redis_client: redis.Redis, client: openai.OpenAI
) -> None:
    batch = begin(client)
    assert members(batch) == {"input": "stream", "open": True, "last_append_at": None}
    assert batch.input_file_id.startswith("file-")
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(batch.input_file_id)
    step(redis_client, batch.id)
    answer = append(client, batch, chat_line("a") + b"\n" + BAD + chat_line("b").rstrip())
    assert answer == {
        "object": "batch.requests",
        "batch_id": batch.id,
        "appended": 3,
        "repeated": 0,
        "errors": [],
        "total": 3,
    }
    batch = client.batches.retrieve(batch.id)
    assert (batch.status, batch.request_counts and batch.request_counts.total) == ("in_progress", 3)
    assert members(batch)["last_append_at"] >= batch.created_at
    step(redis_client, batch.id)
    answer_all(redis_client, refusing)
    answer = append(
        client, batch, chat_line("a") + b"{broken\n" + chat_line("b", "other") + chat_line("c" * 513) + chat_line("c")
    )
    assert (answer["appended"], answer["repeated"], answer["total"]) == (1, 1, 4)
    assert [(error["line"], error["code"]) for error in answer["errors"]] == [
        (2, "invalid_json_line"),
        (3, "duplicate_custom_id"),
        (4, "invalid_request"),
    ]
    step(redis_client, batch.id)
    assert close(client, batch).status == "in_progress"
    assert members(close(client, batch))["open"] is False
    run_to_end(redis_client, batch.id, refusing)
    batch = close(client, batch)
    assert (batch.status, members(batch)["open"]) == ("completed", False)
    counts = batch.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (4, 3, 1)
    assert ids_in(client, batch.output_file_id) == ["a", "b", "c"]
    [error] = map(json.loads, client.files.content(batch.error_file_id or "").content.splitlines())
    assert (error["custom_id"], error["response"]["body"]["error"]["code"]) == ("bad", "invalid_request")
    file = client.files.retrieve(batch.input_file_id)
    assert (file.purpose, file.filename) == ("batch", f"{batch.id}_input.jsonl")
    assert ids_in(client, file.id) == ["a", "bad", "b", "c"]


def test_a_batch_without_requests_completes(redis_client: redis.Redis, client: openai.OpenAI) -> None:
    batch = close(client, begin(client))
    run_to_end(redis_client, batch.id)
    batch = client.batches.retrieve(batch.id)
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("completed", None, None)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "stream", "input_file_id": "file-1"}, "input"),
        ({"input": "file"}, "input"),
        ({"input": 1}, "input"),
        ({}, "input_file_id"),
        ({"input": None}, "input_file_id"),
    ],
)
def test_a_batch_has_one_input(http: httpx.Client, body: dict[str, Any], param: str) -> None:
    answer = http.post("/v1/batches", json={"endpoint": CHAT, "completion_window": "24h", **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_an_open_batch_is_made_once_for_a_key(client: openai.OpenAI) -> None:
    def make() -> Batch:
        made: Any = {"extra_body": {"input": "stream"}, "input_file_id": openai.omit}
        headers = {"Idempotency-Key": "once"}
        return client.batches.create(endpoint=CHAT, completion_window="24h", extra_headers=headers, **made)

    first = make()
    append(client, first, chat_line("a"))
    assert (make().id, make().input_file_id) == (first.id, first.input_file_id)
    assert append(client, make(), chat_line("a"))["repeated"] == 1


def test_what_is_no_open_batch_takes_nothing(redis_client: redis.Redis, client: openai.OpenAI) -> None:
    file = client.files.create(file=("in.jsonl", lines_of(1)), purpose="batch")
    of_file = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    for call in (append, lambda client, batch, _: close(client, batch)):
        with pytest.raises(openai.ConflictError, match="made of a file"):
            call(client, of_file, chat_line("a"))
        with pytest.raises(openai.NotFoundError):
            call(client, of_file.model_copy(update={"id": "batch_" + "0" * 24}), chat_line("a"))
    batch = begin(client)
    close(client, batch)
    with pytest.raises(openai.ConflictError, match="is closed"):
        append(client, batch, chat_line("a"))
    run_to_end(redis_client, batch.id)
    with pytest.raises(openai.ConflictError):
        append(client, batch, chat_line("a"))
    cancelled = begin(client)
    client.batches.cancel(cancelled.id)
    with pytest.raises(openai.ConflictError, match="cancelling"):
        append(client, cancelled, chat_line("a"))
    assert "input" not in of_file.to_dict()


def test_a_refusal_that_no_retry_helps_says_so(http: httpx.Client, client: openai.OpenAI) -> None:
    batch = begin(client)
    close(client, batch)
    answer = http.post(f"/v1/batches/{batch.id}/requests", content=chat_line("a"))
    assert (answer.status_code, answer.headers["x-should-retry"]) == (409, "false")


@pytest.mark.parametrize(("deleted", "status"), [(False, 409), (True, 404)])
def test_an_end_during_a_call_says_what_was_appended(
    redis_client: redis.Redis, http: httpx.Client, client: openai.OpenAI, deleted: bool, status: int
) -> None:
    batch, appended = begin(client), list[int]()

    def body() -> Iterator[bytes]:
        yield b"".join(chat_line(f"early{number}", "x" * 600_000) for number in range(2))
        wait_until(lambda: requests_of(client.batches.retrieve(batch.id)) > 0, 60, "the first requests")
        appended.append(requests_of(client.batches.retrieve(batch.id)))  # one or both, as they arrived
        close(client, batch)
        run_to_end(redis_client, batch.id)
        if deleted:
            client.delete(f"/batches/{batch.id}", cast_to=object)
        yield chat_line("late")

    answer = http.post(f"/v1/batches/{batch.id}/requests", content=body())
    assert answer.status_code == status
    assert f"{appended[0]} requests of this call were appended before" in answer.json()["error"]["message"]


@in_a_folder
def test_a_full_disk_during_a_call_says_what_was_appended(
    http: httpx.Client, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, sync, full, appended = begin(client), os.fsync, threading.Event(), list[int]()

    def sync_unless_full(handle: int) -> None:
        if full.is_set():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(handle)

    def body() -> Iterator[bytes]:
        yield b"".join(chat_line(f"early{number}", "x" * 600_000) for number in range(2))
        wait_until(lambda: requests_of(client.batches.retrieve(batch.id)) > 0, 60, "the first requests")
        appended.append(requests_of(client.batches.retrieve(batch.id)))  # one or both, as they arrived
        full.set()
        yield chat_line("late")

    monkeypatch.setattr(os, "fsync", sync_unless_full)
    answer = http.post(f"/v1/batches/{batch.id}/requests", content=body())
    assert (answer.status_code, answer.headers["x-should-retry"]) == (507, "false")
    assert answer.json()["error"]["message"] == (
        f"The file store has no room left. {appended[0]} requests of this call were appended before."
    )
    answer = http.post(f"/v1/batches/{batch.id}/requests", content=chat_line("late"))
    assert (answer.status_code, "nothing was stored" in answer.text) == (507, True)
    full.clear()
    assert append(client, batch, chat_line("late"))["total"] == appended[0] + 1


def test_a_cancelled_batch_has_an_error_line_for_what_never_ran(
    redis_client: redis.Redis, client: openai.OpenAI
) -> None:
    batch = begin(client)
    append(client, batch, lines_of(3))
    step(redis_client, batch.id)
    answer_all(redis_client, most=1)
    step(redis_client, batch.id)
    append(client, batch, chat_line("late"))
    client.batches.cancel(batch.id)
    run_to_end(redis_client, batch.id)
    batch = client.batches.retrieve(batch.id)
    counts = batch.request_counts
    assert counts is not None
    assert (batch.status, counts.total, counts.completed, counts.failed) == ("cancelled", 4, 1, 3)
    assert "late" in ids_in(client, batch.error_file_id)
    retried = client.post(f"/batches/{batch.id}/retry", cast_to=Batch)
    run_to_end(redis_client, retried.id)
    counts = client.batches.retrieve(retried.id).request_counts
    assert counts is not None
    assert counts.completed == 3


def test_an_ended_batch_keeps_no_file_of_its_appends(
    settings: ApiSettings, redis_client: redis.Redis, client: openai.OpenAI
) -> None:
    batch = begin(client)
    append(client, batch, lines_of(2))
    close(client, batch)
    run_to_end(redis_client, batch.id)
    names = list_names(join(settings.file_store, "batches", batch.id))
    assert [name for name in names if "append" in name or "requests" in name] == []


def test_a_retry_leaves_invalid_requests_out(redis_client: redis.Redis, client: openai.OpenAI) -> None:
    batch = begin(client)
    append(client, batch, chat_line("a") + BAD)
    close(client, batch)
    run_to_end(redis_client, batch.id, lambda claim: ApiError(500, "broken").result("req"))
    retried = client.post(f"/batches/{batch.id}/retry", cast_to=Batch)
    assert ids_in(client, retried.input_file_id) == ["a"]
    only_bad = begin(client)
    append(client, only_bad, BAD)
    close(client, only_bad)
    run_to_end(redis_client, only_bad.id, refusing)
    with pytest.raises(openai.BadRequestError, match="without an answer is valid"):
        client.post(f"/batches/{only_bad.id}/retry", cast_to=Batch)


def test_an_open_batch_expires_with_what_it_has(redis_client: redis.Redis, client: openai.OpenAI) -> None:
    batch = begin(client)
    append(client, batch, lines_of(2))
    step(redis_client, batch.id)
    redis_client.hset(f"{{q}}:batch:{batch.id}", "expires_at", 1.0)
    ticker = Ticker(Queue(redis_client))
    tick(ticker)
    assert get_batch(redis_client, batch.id).outcome == "expired"
    run_to_end(redis_client, batch.id)
    batch = client.batches.retrieve(batch.id)
    assert (batch.status, batch.request_counts and batch.request_counts.failed) == ("expired", 2)
    with pytest.raises(openai.ConflictError):
        append(client, batch, chat_line("late"))


def test_limits_of_an_open_batch(settings: ApiSettings, redis_client: redis.Redis, tmp_path: Path) -> None:
    serve(redis_client, "m")
    settings = ApiSettings(**{**settings.__dict__, "max_batch_lines": 3, "max_file_bytes": 2000})
    with running_api(settings) as url, official_client(url) as client:
        batch = begin(client)
        append(client, batch, lines_of(3))
        with pytest.raises(openai.BadRequestError, match="it may have 3"):
            append(client, batch, chat_line("more"))
        assert append(client, batch, lines_of(3))["repeated"] == 3
        large = begin(client)
        with pytest.raises(openai.APIStatusError) as raised:
            append(client, large, chat_line("a", "x" * 3000))
        assert raised.value.status_code == 413
        append(client, large, chat_line("a", "x" * 1500))
        with pytest.raises(openai.BadRequestError, match="2000"):
            append(client, large, chat_line("b", "x" * 1500))


def test_tokens_of_a_tenant_bound_its_open_batches(settings: ApiSettings, redis_client: redis.Redis) -> None:
    serve(redis_client, "m")
    _, key = create_key(settings.file_store, tenant="alpha", queued_tokens=200)
    _, other = create_key(settings.file_store, tenant="beta")
    with running_api(settings) as url, official_client(url, key) as client, official_client(url, other) as foreign:
        first, second = begin(client), begin(client)
        append(client, first, chat_line("a", "x" * 500))
        step(redis_client, first.id)
        with pytest.raises(openai.RateLimitError, match="are left"):
            append(client, second, chat_line("a", "x" * 500))
        append(client, second, chat_line("b"))
        for call in (append, lambda client, batch, _: close(client, batch)):
            with pytest.raises(openai.NotFoundError):
                call(foreign, first, chat_line("x"))


def test_tokens_of_a_tenant_count_as_they_are_appended_until_they_are_answered(
    settings: ApiSettings, redis_client: redis.Redis
) -> None:
    """Not only once a slice has read them."""
    serve(redis_client, "m")
    _, key = create_key(settings.file_store, tenant="alpha", queued_tokens=200)
    with running_api(settings) as url, official_client(url, key) as client:
        client = client.with_options(max_retries=0)
        first, second = begin(client), begin(client)
        for batch in (first, second):
            step(redis_client, batch.id)
        append(client, first, chat_line("a", "x" * 500))
        for batch in (first, second):
            with pytest.raises(openai.RateLimitError, match="are left"):
                append(client, batch, chat_line("b", "x" * 500))
        with pytest.raises(openai.BadRequestError, match="append fewer"):
            append(client, second, chat_line("b", "x" * 1000))
        step(redis_client, first.id)
        answer_all(redis_client)
        for batch in (first, second):
            assert append(client, batch, chat_line(f"b of {batch.id}", "x" * 250))["appended"] == 1
        with pytest.raises(openai.RateLimitError, match="are left"):
            append(client, first, chat_line("c", "x" * 500))


def test_many_short_answers_leave_the_long_requests_in_queue(settings: ApiSettings, redis_client: redis.Redis) -> None:
    """Also once the batch is closed, and until these are answered."""
    serve(redis_client, "m")
    _, key = create_key(settings.file_store, tenant="alpha", queued_tokens=50_000)
    with running_api(settings) as url, official_client(url, key) as client:
        client = client.with_options(max_retries=0)
        first, second = begin(client), begin(client)
        for batch in (first, second):
            step(redis_client, batch.id)
        append(client, first, lines_of(80))
        step(redis_client, first.id)
        answer_all(redis_client)
        append(client, first, b"".join(chat_line(f"long-{number}", "x" * 8_000) for number in range(20)))
        more = chat_line("more", "x" * 80_000)
        for action in (lambda: None, lambda: step(redis_client, first.id), lambda: close(client, first)):
            action()
            step(redis_client, first.id)
            with pytest.raises(openai.RateLimitError, match="are left"):
                append(client, second, more)
        answer_all(redis_client, most=15)
        assert append(client, second, more)["appended"] == 1
        run_to_end(redis_client, first.id)
        assert append(client, second, chat_line("last", "x" * 100_000))["appended"] == 1


def test_without_a_key_a_web_page_appends_nothing(http: httpx.Client, client: openai.OpenAI) -> None:
    batch = begin(client)
    path = f"/v1/batches/{batch.id}/requests"
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        assert http.post(path, content=chat_line("a"), headers={"content-type": kind}).status_code == 415
    for kind in ("application/jsonl", "application/x-ndjson"):
        assert http.post(path, content=chat_line("a"), headers={"content-type": kind}).status_code == 200


def test_an_emptied_redis_refuses_until_the_batch_is_back(
    settings: ApiSettings, redis_client: redis.Redis, client: openai.OpenAI
) -> None:
    batch = begin(client)
    append(client, batch, lines_of(2))
    redis_client.flushall()
    with pytest.raises(openai.InternalServerError):
        append(client, batch, chat_line("late"))
    rebuild_all(Queue(redis_client), settings.file_store)
    step(redis_client, batch.id)
    assert append(client, batch, lines_of(3))["appended"] == 1
    close(client, batch)
    assert run_to_end(redis_client, batch.id).completed == 3


def test_a_line_of_a_model_that_an_emptied_redis_may_know_soon_is_to_be_sent_again(
    redis_client: redis.Redis, client: openai.OpenAI
) -> None:
    batch = begin(client)
    lines = chat_line("a") + chat_line("b", model="second")
    redis_client.delete(keys.REGISTRY_SINCE)
    with pytest.raises(openai.InternalServerError):
        append(client, batch, lines)
    redis_client.decrby(keys.REGISTRY_SINCE, 3600_000)
    assert append(client, batch, lines)["appended"] == 2  # the second one as what ends with an error


def test_clients_append_to_one_batch_at_once(redis_client: redis.Redis, client: openai.OpenAI) -> None:
    batch = begin(client)
    answers: list[dict[str, Any]] = []

    def send() -> None:
        for start in range(10):
            lines = b"".join(chat_line(f"c{number}") for number in range(start, start + 10))
            answers.append(append(client, batch, lines))

    threads = [threading.Thread(target=send) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(answer["appended"] for answer in answers) == 19
    assert sum(answer["appended"] + answer["repeated"] for answer in answers) == 600
    close(client, batch)
    assert run_to_end(redis_client, batch.id).completed == 19


def test_a_process_that_drives_the_batch_runs_lines_as_they_come(
    redis_url: str, redis_client: redis.Redis, client: openai.OpenAI, settings: ApiSettings
) -> None:
    store = settings.file_store
    with control_plane(redis_url, ("--file-store", store), {"FILE_STORE": store}):
        batch = begin(client)
        for number in range(1, 6):
            append(client, batch, chat_line(f"c{number}"))
            wait_until(lambda: answer_all(redis_client), 60, "the line to come")
        close(client, batch)
        wait_until(lambda: client.batches.retrieve(batch.id).status == "completed", 60, "the end")
    batch = client.batches.retrieve(batch.id)
    assert ids_in(client, batch.output_file_id) == [f"c{number}" for number in range(1, 6)]
