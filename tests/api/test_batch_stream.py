"""Following a batch: all tokens of all of its requests, each once, whatever is cut."""

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from api.routes import batch_stream
from api.settings import ApiSettings
from api.token_events import next_entries
from jobs.batch.client import cancel_batch
from jobs.batch.manifest import load_manifest
from jobs.control.advance import request_of
from jobs.protocol.ids import BATCH, new_id
from jobs.protocol.requests import Claim
from jobs.protocol.results import ApiError
from jobs.queue import keys
from jobs.queue.following import Watch
from jobs.queue.request_queue import Queue
from jobs.store.api_keys import create_key
from jobs.store.storage import stamp_of
from tests.api.followed_batch import COMPLETED, LINES, PIECES, WHOLE, FollowedBatch, Steps, ends
from tests.api.scripted_worker import MODEL, ScriptedWorker
from tests.support.api_server import running_api
from tests.support.event_reader import EventReader, batch_texts, parse_events
from tests.support.requests import delta
from tests.support.waiting import wait_until


@pytest.fixture
def steps(scripted: Callable[..., ScriptedWorker]) -> Iterator[Steps]:
    """A worker that waits before each piece."""
    steps = Steps()
    scripted(steps.script)
    yield steps
    steps.closed = True


@pytest.fixture
def settings(redis_url: str, tmp_path: Path) -> ApiSettings:
    return ApiSettings(redis_url=redis_url, file_store=str(tmp_path / "store"), ping_seconds=0.2)


@pytest.fixture
def api_url(settings: ApiSettings) -> Iterator[str]:
    with running_api(settings) as url:
        yield url


@pytest.fixture
def batch(redis_client: redis.Redis, redis_url: str, api_url: str, tmp_path: Path) -> FollowedBatch:
    return FollowedBatch(redis_client, api_url, tmp_path / "input")


@pytest.fixture
def path(api_url: str, batch: FollowedBatch) -> str:
    return api_url + batch.path


def test_all_tokens_come_under_the_names_of_their_lines_and_then_the_batch(
    batch: FollowedBatch, path: str, scripted: Callable[..., ScriptedWorker]
) -> None:
    with EventReader(path) as reader:
        scripted(lambda claim: PIECES)
        batch.start()
        batch.finish()
        *events, end, done = reader.wait_ended()
    assert batch_texts(events) == WHOLE
    assert ends(events) == COMPLETED
    assert {value["line"]: value["custom_id"] for _, value in events} == {1: "c1", 2: "c2", 3: "c3"}
    assert all(
        set(choice) == {"index", "token_offset", "text", "text_offset"}
        for _, value in events
        for choice in value["choices"]
    )
    assert (end.value["object"], end.value["id"], end.value["status"]) == ("batch", batch.id, "completed")
    assert done.value is None


def run_early(client: redis.Redis, batch: FollowedBatch) -> None:
    """Have all lines run while the batch is validated, as large ones do."""
    queue = Queue(client)
    manifest = load_manifest(queue.batch_fields(batch.id).root)
    assert manifest is not None
    stamp = stamp_of(manifest.spec.input)
    assert stamp is not None
    lines = Path(manifest.spec.input).read_bytes().splitlines(keepends=True)
    rows = [
        (number, request_of(manifest.spec, number, line, time.time(), manifest.defaults))
        for number, line in enumerate(lines, 1)
    ]
    assert queue.ingest_early(batch.id, rows, f"{stamp[0]} {stamp[1]}")
    wait_until(lambda: queue.undrained_lines(batch.id) == LINES, 60, "the lines to end")


def test_what_runs_while_the_batch_is_validated_is_shown_once_it_is_in_progress(
    redis_client: redis.Redis,
    batch: FollowedBatch,
    path: str,
    http: httpx.Client,
    scripted: Callable[..., ScriptedWorker],
) -> None:
    with EventReader(path) as reader:
        scripted(lambda claim: PIECES)
        run_early(redis_client, batch)
        record = http.get(f"/v1/batches/{batch.id}").json()
        assert (record["status"], record["request_counts"]["completed"]) == ("validating", 0)
        assert (record["output_file_id"], record["error_file_id"]) == (None, None)
        assert http.get(f"/v1/streams/{batch.id}/1").status_code == 404
        assert reader.events == []
        batch.start()
        batch.finish()
        *events, _, _ = reader.wait_ended()
    assert batch_texts(events) == WHOLE
    assert ends(events) == COMPLETED


def test_nothing_is_shown_of_early_lines_that_were_discarded(
    redis_client: redis.Redis, batch: FollowedBatch, path: str, scripted: Callable[..., ScriptedWorker]
) -> None:
    """They are of an input that changed."""
    pieces = ["stale "] * 9
    with EventReader(path) as reader:
        scripted(lambda claim: list(pieces))
        run_early(redis_client, batch)
        queue = Queue(redis_client)
        assert queue.discard(batch.id, "validating", queue.batch_fields(batch.id).generation)
        pieces[:] = PIECES
        run_early(redis_client, batch)
        batch.start()
        batch.finish()
        *events, _, _ = reader.wait_ended()
    assert batch_texts(events) == WHOLE
    assert ends(events) == COMPLETED


def test_no_line_is_shown_of_a_batch_that_is_cancelled_while_it_is_validated(
    redis_client: redis.Redis, batch: FollowedBatch, path: str, scripted: Callable[..., ScriptedWorker]
) -> None:
    with EventReader(path) as reader:
        scripted(lambda claim: PIECES)
        run_early(redis_client, batch)
        cancel_batch(redis_client, batch.id)
        batch.finish()
        (_, end), _ = reader.wait_ended()
    assert (end["status"], end["request_counts"]) == ("cancelled", {"total": 0, "completed": 0, "failed": 0})


def test_who_has_seen_the_head_of_the_answer_misses_nothing(
    batch: FollowedBatch, path: str, scripted: Callable[..., ScriptedWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = Watch.begin

    def slowly(watch: Watch) -> str:
        time.sleep(1)
        return begin(watch)

    monkeypatch.setattr(Watch, "begin", slowly)
    with EventReader(path) as reader:
        scripted(lambda claim: PIECES)
        batch.start()
        batch.finish()
        events = reader.wait_ended()
    assert batch_texts(events) == WHOLE
    assert ends(events) == COMPLETED


async def without_silence(*args: Any) -> list[Any]:
    """As `next_entries`, and as if tokens came without a pause."""
    while not (entries := await next_entries(*args)):
        pass
    return entries


def test_who_comes_while_the_plan_is_made_is_shown_what_runs(
    batch: FollowedBatch, path: str, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = Watch.begin

    def after_the_plan(watch: Watch) -> str:
        monkeypatch.setattr(Watch, "begin", begin)
        batch.start()
        return begin(watch)

    monkeypatch.setattr(Watch, "begin", after_the_plan)
    monkeypatch.setattr(batch_stream, "next_entries", without_silence)
    with EventReader(path) as reader:
        steps.go_on(1)
        assert {value["custom_id"] for _, value in reader.wait(LINES)} == set(WHOLE)
        steps.go_on(3)
        batch.finish()
        events = reader.wait_ended()
    assert batch_texts(events) == WHOLE
    assert ends(events) == COMPLETED


def test_who_comes_later_is_shown_what_there_is_so_far(batch: FollowedBatch, path: str, steps: Steps) -> None:
    steps.go_on(2)
    batch.start()
    wait_until(lambda: published(batch) >= 2 * LINES, 60, "some tokens")
    with EventReader(path) as reader:
        snapshot = reader.wait(LINES)
        assert {value["custom_id"] for _, value in snapshot} == set(WHOLE)
        assert sum(len(value["choices"][0]["text"].split()) for _, value in snapshot) == 2 * LINES
        assert [event_id is None for event_id, _ in snapshot] == [True, True, False]
        steps.go_on(2)
        batch.finish()
        events = reader.wait_ended()
    assert batch_texts(events) == WHOLE
    assert ends(events) == COMPLETED


def published(batch: FollowedBatch) -> int:
    return Queue(batch.client).tokens_in_flight()


def test_a_cut_reader_goes_on_at_any_event_on_any_api_process(
    batch: FollowedBatch, path: str, settings: ApiSettings, steps: Steps
) -> None:
    steps.go_on(1)
    batch.start()
    wait_until(lambda: published(batch) >= LINES, 60, "some tokens")
    with EventReader(path) as reader, running_api(settings) as other:
        reader.wait(1)
        steps.go_on(3)
        wait_until(lambda: len(ends(reader.events)) == LINES, 60, "the ends of all requests")
        seen = list(reader.events)
        batch.finish()
        events = reader.wait_ended()
        assert len(seen) > LINES
        for number, event in enumerate(seen):
            if event.id is not None:
                with EventReader(other + batch.path, event.id) as rest:
                    assert rest.wait_ended() == events[number + 1 :], number
    assert batch_texts(events) == WHOLE


@pytest.mark.parametrize("lost", ["trimmed", "expired", "of another time"])
def test_who_cannot_go_on_is_shown_what_there_is_so_far(
    batch: FollowedBatch, path: str, lost: str, redis_client: redis.Redis, steps: Steps
) -> None:
    steps.go_on(1)
    batch.start()
    with EventReader(path) as reader:
        seen = reader.wait(LINES)
    wait_until(lambda: published(batch) == LINES, 60, "some tokens")
    last_id = "1-1" if lost == "of another time" else seen[-1].id
    if lost == "expired":
        redis_client.delete(keys.batch_tokens(batch.id))
    steps.go_on(1)
    wait_until(lambda: published(batch) == 2 * LINES, 60, "more tokens")
    if lost == "trimmed":
        redis_client.xtrim(keys.batch_tokens(batch.id), maxlen=1, approximate=False)
    with EventReader(path, last_id) as reader:
        assert sum(len(text.split()) for text in batch_texts(reader.wait(LINES)).values()) == 2 * LINES
        steps.go_on(2)
        batch.finish()
        events = reader.wait_ended()
    assert batch_texts(events) == WHOLE
    assert ends(events) == COMPLETED


def test_a_line_that_fails_says_so(batch: FollowedBatch, path: str, scripted: Callable[..., ScriptedWorker]) -> None:
    def script(claim: Claim) -> list[str] | ApiError:
        return ApiError(400, "no", code="no") if claim.key.line == 2 else PIECES

    with EventReader(path) as reader:
        scripted(script)
        batch.start()
        batch.finish()
        events = reader.wait_ended()
    assert ends(events) == [("c1", "completed"), ("c2", "failed"), ("c3", "completed")]
    assert "c2" not in batch_texts(events)


def test_a_batch_that_is_cancelled_ends_its_stream(batch: FollowedBatch, path: str, steps: Steps) -> None:
    steps.go_on(1)
    batch.start()
    with EventReader(path) as reader:
        reader.wait(LINES)
        cancel_batch(batch.client, batch.id)
        batch.finish()
        *_, end, done = reader.wait_ended()
    assert (end.value["status"], done.value) == ("cancelled", None)


def test_of_a_batch_that_ended_there_is_its_end(
    batch: FollowedBatch, path: str, scripted: Callable[..., ScriptedWorker]
) -> None:
    scripted(lambda claim: PIECES)
    batch.start()
    batch.finish()
    for last_id in (None, "1-1"):
        with EventReader(path, last_id) as reader:
            end, done = reader.wait_ended()
        assert (end.value["status"], done.value) == ("completed", None)
    assert not batch.client.exists(keys.batch_tokens(batch.id))


def test_what_is_no_batch_is_not_found(http: httpx.Client) -> None:
    for name in ("batch_x", new_id(BATCH, 0), "%00", "x" * 5000):
        answer = http.get(f"/v1/batches/{name}/stream")
        assert (answer.status_code, set(answer.json()["error"])) == (404, {"message", "type", "param", "code"}), name


@pytest.mark.parametrize("after", ["x", "1", "-", "99999999999999999999-1"])
def test_what_is_not_the_id_of_an_event_is_refused(http: httpx.Client, batch: FollowedBatch, after: str) -> None:
    answer = http.get(batch.path, headers={"last-event-id": after})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Last-Event-ID")


def test_a_reader_that_left_is_forgotten(batch: FollowedBatch, path: str) -> None:
    values: list[Any] = []
    for _ in range(3):
        with EventReader(path):
            wait_until(lambda: batch.client.exists(keys.batch_tokens(batch.id)), 60, "the stream")
        values.append(batch.client.pttl(keys.batch_tokens(batch.id)))
    assert all(0 < left <= 60_000 for left in values)


def test_a_batch_of_another_tenant_is_not_found(
    redis_client: redis.Redis, redis_url: str, api_url: str, settings: ApiSettings, http: httpx.Client, tmp_path: Path
) -> None:
    (_, mine), (_, other) = (create_key(settings.file_store, tenant=tenant) for tenant in ("mine", "other"))
    batch = FollowedBatch(redis_client, api_url, tmp_path / "input", key=mine)
    for key, status in ((other, 404), ("sk-wrong", 401)):
        assert http.get(batch.path, headers={"authorization": f"Bearer {key}"}).status_code == status
    with EventReader(api_url + batch.path, headers={"authorization": f"Bearer {mine}"}):
        pass


def test_a_reader_that_does_not_read_holds_up_nothing_and_is_shown_later_what_there_is(
    batch: FollowedBatch, api_url: str, queue: Queue
) -> None:
    """Far more comes than sockets hold: what is not sent is not kept for it either."""
    batch.start()
    count, text = 16_000, "x" * 700
    host, port = api_url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        client.sendall(f"GET {batch.path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode())
        wait_until(lambda: batch.client.exists(keys.batch_tokens(batch.id)), 60, "the reader")
        [claim, *_] = queue.claim("known", 1, LINES, models=[MODEL])
        for first in range(0, count, 100):
            queue.publish(
                "known", [delta(claim, index, [1], text, index * len(text)) for index in range(first, first + 100)]
            )
        batch.client.xtrim(keys.batch_tokens(batch.id), maxlen=10, approximate=False)
        events = []
        for event in parse_events(line.rstrip("\r\n") for line in client.makefile(encoding="utf-8")):
            events.append(event)
            [choice] = event.value["choices"]
            if choice["text_offset"] + len(choice["text"]) == count * len(text):
                break
    assert list(batch_texts(events).values()) == [text * count]
    assert len(events) < count // 2, f"{len(events)} of {count} events were kept"
