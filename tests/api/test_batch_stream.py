"""Following a batch: all tokens of all of its requests, each once, whatever is cut."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import redis

from api.settings import ApiSettings
from jobs import control, keys
from jobs.batches import cancel_batch
from jobs.ids import BATCH, new_id
from jobs.queue import Queue
from jobs.registry import WorkerRecord
from jobs.requests import Claim
from jobs.results import ApiError
from tests.api.scripted_worker import MODEL, ScriptedWorker
from tests.support.api_server import running_api
from tests.support.batch_steps import step
from tests.support.control_plane import write_input
from tests.support.event_reader import Event, EventReader
from tests.support.waiting import wait_until

PIECES = ["one ", "two ", "three ", "four"]
LINES = 3


class Batch:
    """A batch of `LINES` lines, made over HTTP, whose control plane runs step by step here."""

    def __init__(self, client: redis.Redis, redis_url: str, api_url: str, folder: Path) -> None:
        self.client = client
        control.use_server(redis_url)
        Queue(client).register_worker(WorkerRecord("known", [MODEL], "ready", 128, time.time(), "host", 1))
        source = write_input(folder / "in.jsonl", LINES, model=MODEL)
        with openai.OpenAI(base_url=f"{api_url}/v1", api_key="none", max_retries=0) as official:
            file = official.files.create(file=source, purpose="batch")
            self.id = official.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
            ).id  # fmt: skip
        self.path = f"/v1/batches/{self.id}/stream"

    def start(self) -> None:
        """Its lines are ready."""
        assert step(self.client, self.id).state == "in_progress"
        step(self.client, self.id)

    def finish(self) -> None:
        """To its end."""
        wait_until(lambda: step(self.client, self.id).ended, 60, "the batch to end")


class Steps:
    """Gives every line its next piece only when told so."""

    def __init__(self) -> None:
        self._gates = {line: threading.Semaphore(0) for line in range(1, LINES + 1)}
        self.closed = False

    def script(self, claim: Claim) -> Iterator[str]:
        for piece in PIECES:
            while not self._gates[claim.key.line].acquire(timeout=0.02):
                if self.closed:
                    return
            yield piece

    def go_on(self, pieces: int) -> None:
        """So many pieces for each line."""
        for gate in self._gates.values():
            gate.release(pieces)


@pytest.fixture
def steps(scripted: Callable[..., ScriptedWorker]) -> Iterator[Steps]:
    """A worker that waits before each piece."""
    steps = Steps()
    scripted(steps.script)
    yield steps
    steps.closed = True


@pytest.fixture
def settings(redis_url: str, tmp_path: Path) -> ApiSettings:
    return ApiSettings(REDIS_URL=redis_url, FILE_STORE=str(tmp_path / "store"), ping_seconds=0.2)


@pytest.fixture
def api_url(settings: ApiSettings) -> Iterator[str]:
    with running_api(settings) as url:
        yield url


@pytest.fixture
def batch(redis_client: redis.Redis, redis_url: str, api_url: str, tmp_path: Path) -> Batch:
    return Batch(redis_client, redis_url, api_url, tmp_path / "input")


@pytest.fixture
def path(api_url: str, batch: Batch) -> str:
    return api_url + batch.path


def texts(events: Iterable[Event]) -> dict[str, str]:
    """What each request was told to have generated; fails where something is missing or comes twice."""
    found: defaultdict[str, str] = defaultdict(str)
    for _, value in events:
        for choice in value["choices"] if value and "choices" in value else []:
            assert choice["text_offset"] == len(found[value["custom_id"]]), value
            found[value["custom_id"]] += choice["text"]
    return dict(found)


def ends(events: Iterable[Event]) -> list[tuple[str, str]]:
    return sorted((value["custom_id"], value["status"]) for _, value in events if value and value.get("status") and "custom_id" in value)


WHOLE = {f"c{number}": "".join(PIECES) for number in range(1, LINES + 1)}
COMPLETED = [(f"c{number}", "completed") for number in range(1, LINES + 1)]


def test_all_tokens_come_under_the_names_of_their_lines_and_then_the_batch(
    batch: Batch, path: str, scripted: Callable[..., ScriptedWorker]
) -> None:
    with EventReader(path) as reader:
        scripted(lambda claim: PIECES)
        batch.start()
        batch.finish()
        *events, end, done = reader.wait_ended()
    assert texts(events) == WHOLE
    assert ends(events) == COMPLETED
    assert {value["line"]: value["custom_id"] for _, value in events} == {1: "c1", 2: "c2", 3: "c3"}
    assert all(set(choice) == {"index", "token_offset", "text", "text_offset"} for _, value in events for choice in value["choices"])
    assert (end.value["object"], end.value["id"], end.value["status"]) == ("batch", batch.id, "completed")
    assert done.value is None


def test_who_comes_later_is_shown_what_there_is_so_far(batch: Batch, path: str, steps: Steps) -> None:
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
    assert texts(events) == WHOLE
    assert ends(events) == COMPLETED


def published(batch: Batch) -> int:
    return Queue(batch.client).tokens_in_flight()


def test_a_cut_reader_goes_on_at_any_event_on_any_api_process(batch: Batch, path: str, settings: ApiSettings, steps: Steps) -> None:
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
    assert texts(events) == WHOLE


@pytest.mark.parametrize("lost", ["trimmed", "expired", "of another time"])
def test_who_cannot_go_on_is_shown_what_there_is_so_far(
    batch: Batch, path: str, lost: str, redis_client: redis.Redis, steps: Steps
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
        assert sum(len(text.split()) for text in texts(reader.wait(LINES)).values()) == 2 * LINES
        steps.go_on(2)
        batch.finish()
        events = reader.wait_ended()
    assert texts(events) == WHOLE
    assert ends(events) == COMPLETED


def test_a_line_that_fails_says_so(batch: Batch, path: str, scripted: Callable[..., ScriptedWorker]) -> None:
    def script(claim: Claim) -> list[str] | ApiError:
        return ApiError(400, "no", code="no") if claim.key.line == 2 else PIECES

    with EventReader(path) as reader:
        scripted(script)
        batch.start()
        batch.finish()
        events = reader.wait_ended()
    assert ends(events) == [("c1", "completed"), ("c2", "failed"), ("c3", "completed")]
    assert "c2" not in texts(events)


def test_a_batch_that_is_cancelled_ends_its_stream(batch: Batch, path: str, steps: Steps) -> None:
    steps.go_on(1)
    batch.start()
    with EventReader(path) as reader:
        reader.wait(LINES)
        cancel_batch(batch.client, batch.id)
        batch.finish()
        *_, end, done = reader.wait_ended()
    assert (end.value["status"], done.value) == ("cancelled", None)


def test_of_a_batch_that_ended_there_is_its_end(batch: Batch, path: str, scripted: Callable[..., ScriptedWorker]) -> None:
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
def test_what_is_not_the_id_of_an_event_is_refused(http: httpx.Client, batch: Batch, after: str) -> None:
    answer = http.get(batch.path, headers={"last-event-id": after})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Last-Event-ID")


def test_a_reader_that_left_is_forgotten(batch: Batch, path: str) -> None:
    values: list[Any] = []
    for _ in range(3):
        with EventReader(path):
            wait_until(lambda: batch.client.exists(keys.batch_tokens(batch.id)), 60, "the stream")
        values.append(batch.client.pttl(keys.batch_tokens(batch.id)))
    assert all(0 < left <= 60_000 for left in values)
