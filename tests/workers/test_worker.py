"""One worker end to end: a real Redis, the real engine in its own process, the demo model."""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.protocol.requests import Request, RequestKey, StreamEntry
from jobs.protocol.results import Result
from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue
from jobs.queue.settings import QueueSettings
from jobs.queue.streams import FIRST_ID
from tests.support.poison import Poison, poisoned_environment
from tests.support.processes import wait_for_rest
from tests.support.redis_server import running_server
from tests.support.requests import read_api, ready_length, text_in, token_ids_in
from tests.support.waiting import wait_until
from tests.support.worker_process import WorkerProcess, running_worker
from workers.replica.statistics import declared_metrics
from workers.worker import _in_daemon_thread

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
SETTINGS = QueueSettings(lease_seconds=2.0)
_numbers = itertools.count()


@pytest.fixture(scope="module")
def shared(request: pytest.FixtureRequest) -> Iterator[tuple[Queue, WorkerProcess]]:
    """One worker on one server for all tests that leave it as it was."""
    with tempfile.TemporaryDirectory() as folder, running_server(Path(folder)) as server:
        queue = Queue(connect(server.url), SETTINGS)
        flags = ("--lease-seconds", "2", "--stream-interval", "0.2", "--max-num-seqs", "16")
        with running_worker(queue, server.url, *flags, **poisoned_environment(Poison("tortoise", "slow"))) as worker:
            yield queue, worker


def test_what_ends_a_thread_that_is_waited_for_is_told() -> None:
    """Also where it is no `Exception`, as a panic of the tokenizers library."""

    class ThreadPanic(BaseException):
        """As the library raises."""

    def panic() -> None:
        raise ThreadPanic

    async def wait() -> None:
        await asyncio.wait_for(_in_daemon_thread(panic), 60)

    with pytest.raises(ThreadPanic):
        asyncio.run(wait())


def question(text: str, **parameters: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [{"role": "user", "content": text}], "temperature": 0, **parameters}


def endless(tokens: int, **parameters: Any) -> dict[str, Any]:
    return question("Repeat this list in order: one two three", max_tokens=tokens, ignore_eos=True, **parameters)


def slow(tokens: int, **parameters: Any) -> dict[str, Any]:
    """It takes the shared worker 50 ms a token, so that a test finds it running."""
    return question("What does a tortoise eat?", max_tokens=tokens, ignore_eos=True, **parameters)


def run_batch(queue: Queue, bodies: list[dict[str, Any] | bytes], endpoint: str = CHAT) -> list[Result]:
    """Results of a batch, by line."""
    batch = submit_batch(queue, bodies, endpoint)
    wait_until(lambda: len(queue.results(batch)) == len(bodies), 120, f"{len(bodies)} results")
    return [result for _, result in queue.results(batch)]


def submit_batch(
    queue: Queue, bodies: list[dict[str, Any] | bytes], endpoint: str = CHAT, watched: bool = False
) -> str:
    """One that is `watched` from before its beginning has streams that can be read to their ends,
    and after.
    """
    batch = f"batch_{next(_numbers)}"
    queue.create_batch(batch, len(bodies), state="in_progress")
    if watched:
        queue.watch(batch, 600)
    raw = [body if isinstance(body, bytes) else json.dumps(body).encode() for body in bodies]
    lines = [(line, Request(endpoint, "demo", body, seed=line)) for line, body in enumerate(raw)]
    assert queue.ingest(batch, lines, 0, len(lines))
    return batch


def submit_live(queue: Queue, body: dict[str, Any], endpoint: str = CHAT) -> tuple[RequestKey, str]:
    """A live call and the API process that gets its tokens."""
    number = next(_numbers)
    live_id, api = f"live_{number}", f"api_{number}"
    queue.submit(live_id, Request(endpoint, body["model"], json.dumps(body).encode(), seed=1, reply_to=api))
    return RequestKey(live_id, 0), api


def follow(queue: Queue, api: str, until: int | None = None, timeout: float = 120.0) -> list[StreamEntry]:
    """What an API process receives, up to the result or the given number of entries."""
    entries: list[StreamEntry] = []
    last = FIRST_ID
    deadline = time.monotonic() + timeout
    while not (entries and entries[-1].result is not None) and (until is None or len(entries) < until):
        assert time.monotonic() < deadline, entries
        for entry_id, entry in read_api(queue, api, last, 1000):
            entries.append(entry)
            last = entry_id
    return entries


def answer(result: Result) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(result.body)
    return body


def text_of(result: Result) -> str:
    choice = answer(result)["choices"][0]
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text


def test_lines_become_results_in_openais_shape(shared: tuple[Queue, WorkerProcess]) -> None:
    queue, _ = shared
    results = run_batch(queue, [question(f"What is {n} + 30?") for n in range(40)])
    for result in results:
        body = answer(result)
        assert result.status == 200
        assert body["object"] == "chat.completion"
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["usage"]["prompt_tokens"] == result.usage.prompt_tokens > 0
        assert body["usage"]["completion_tokens"] == result.usage.completion_tokens > 1
    assert len({answer(result)["id"] for result in results}) == 40


def test_a_shared_beginning_is_computed_once(shared: tuple[Queue, WorkerProcess]) -> None:
    queue, _ = shared
    system = {"role": "system", "content": "You answer in few words and never forget to be polite. " * 4}
    bodies: list[dict[str, Any] | bytes] = []
    for n in range(20):
        body = question(f"What is {n} + 2?", max_tokens=5)
        bodies.append({**body, "messages": [system, *body["messages"]]})
    usages = [result.usage for result in run_batch(queue, bodies)]
    assert max(usage.cached_tokens for usage in usages) > 16
    assert all(usage.cached_tokens < usage.prompt_tokens for usage in usages)


def test_the_same_seed_gives_the_same_answer_beside_any_others(shared: tuple[Queue, WorkerProcess]) -> None:
    queue, _ = shared
    body = question("What is 41 + 30?", temperature=1.0, seed=1234, max_tokens=40, ignore_eos=True)
    other = question("Spell the word apple.", temperature=1.0, max_tokens=40, ignore_eos=True)
    (alone,) = run_batch(queue, [body])
    again = {**body, "user": "again"}  # no copy
    crowd = run_batch(queue, [other, body, other, other, again, other, other, other])
    assert text_of(alone) == text_of(crowd[1]) == text_of(crowd[4])
    # Unseeded lines draw by their stored seeds
    assert len({text_of(result) for result in crowd}) > 2


def test_completions_take_text_and_token_ids(shared: tuple[Queue, WorkerProcess]) -> None:
    queue, _ = shared
    bodies: list[dict[str, Any] | bytes] = [
        {"model": "demo", "prompt": prompt, "temperature": 0} for prompt in ("one two", [40, 41, 42])
    ]
    by_text, by_ids = run_batch(queue, bodies, COMPLETIONS)
    assert answer(by_text)["object"] == "text_completion"
    assert by_text.usage.completion_tokens <= 16
    assert by_ids.usage.prompt_tokens == 3


def test_bad_values_become_error_results(shared: tuple[Queue, WorkerProcess]) -> None:
    queue, _ = shared
    long = "word " * 3000
    bodies: list[dict[str, Any] | bytes] = [
        question("x", temperature=-1),
        question(long),
        question("x", max_tokens=5000),
        {"model": "demo"},
        {"model": "other", "messages": [{"role": "user", "content": "x"}]},
        b"not json",
        question("fine", unheard_of=1),
    ]
    errors = [(result.status, answer(result).get("error") or {}) for result in run_batch(queue, bodies)]
    assert [status for status, _ in errors] == [400, 400, 400, 400, 404, 400, 200]
    assert [error.get("param") for _, error in errors[:5]] == [
        "temperature",
        "messages",
        "messages",
        "messages",
        "model",
    ]
    assert errors[1][1]["code"] == errors[2][1]["code"] == "context_length_exceeded"
    assert errors[4][1]["code"] == "model_not_found"
    vocabulary, long_prompt = run_batch(
        queue, [{"model": "demo", "prompt": [10**6]}, {"model": "demo", "prompt": long}], COMPLETIONS
    )
    assert (vocabulary.status, long_prompt.status) == (400, 400)
    assert answer(long_prompt)["error"]["param"] == "prompt"


def test_a_live_call_is_accepted_and_streams(shared: tuple[Queue, WorkerProcess]) -> None:
    queue, _ = shared
    key, api = submit_live(queue, slow(200))
    entries = follow(queue, api)
    assert entries[0].accepted
    assert not token_ids_in(entries[0])
    assert all(entry.key == key for entry in entries)
    result = entries[-1].result
    assert result is not None
    assert "".join(text_in(entry) for entry in entries) == text_of(result)
    chunks = [chunk for entry in entries for chunk in entry.chunks]
    assert [chunk.index for chunk in chunks] == [
        0,
        *itertools.accumulate(len(chunk.token_ids) for chunk in chunks[:-1]),
    ]
    assert sum(len(token_ids_in(entry)) for entry in entries) == 200
    assert len(entries) > 2  # in pieces, not all at once
    assert answer(result)["choices"][0]["finish_reason"] == "length"


def test_a_live_call_that_cannot_run_is_refused_at_once(shared: tuple[Queue, WorkerProcess]) -> None:
    queue, _ = shared
    _, api = submit_live(queue, question("word " * 3000))
    (entry,) = follow(queue, api)
    assert entry.result is not None
    assert entry.result.status == 400
    assert not entry.accepted


@pytest.mark.proof
def test_live_calls_get_in_when_batch_work_fills_every_slot(shared: tuple[Queue, WorkerProcess]) -> None:
    queue, _ = shared
    batch = submit_batch(queue, [slow(100, seed=line) for line in range(30)])  # ten seconds
    wait_until(lambda: ready_length(queue, batch) < 30, 60, "the batch to be started")
    _, api = submit_live(queue, endless(5))
    follow(queue, api)
    assert len(queue.results(batch)) < 30
    wait_until(lambda: len(queue.results(batch)) == 30, 120, "the batch")


def test_stop_strings_end_the_answer(shared: tuple[Queue, WorkerProcess]) -> None:
    queue, _ = shared
    (whole,) = run_batch(queue, [endless(60)])
    text = text_of(whole)
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    (stopped,) = run_batch(queue, [endless(60, stop=[stop, "never seen"])])
    choice = answer(stopped)["choices"][0]
    assert text_of(stopped) == text[: text.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert 0 < stopped.usage.completion_tokens < 60
    assert 0 < stopped.usage.cached_tokens < stopped.usage.prompt_tokens
    _, api = submit_live(queue, endless(60, stop=stop))
    entries = follow(queue, api)
    assert "".join(text_in(entry) for entry in entries) == text_of(stopped)


def test_stop_token_ids_and_eos(shared: tuple[Queue, WorkerProcess]) -> None:
    queue, _ = shared
    _, api = submit_live(queue, endless(30))
    entries = follow(queue, api)
    token_ids = [token_id for entry in entries for token_id in token_ids_in(entry)]
    stop = token_ids[10]
    (stopped,) = run_batch(queue, [endless(30, stop_token_ids=[stop])])
    assert stopped.usage.completion_tokens == token_ids.index(stop) + 1
    choice = answer(stopped)["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    (by_eos,) = run_batch(queue, [question("What is 2 + 3?")])
    assert answer(by_eos)["choices"][0]["stop_reason"] is None


def test_someone_who_watches_a_batch_sees_its_tokens_soon(shared: tuple[Queue, WorkerProcess]) -> None:
    queue, _ = shared
    batch = submit_batch(queue, [slow(60)])
    key = RequestKey(batch, 0)
    queue.watch(batch, 600)
    entries: list[StreamEntry] = []
    last = FIRST_ID
    while not (entries and entries[-1].result is not None):
        for entry in queue.read_tokens({key: last}, 5.0):
            entries.append(entry)
            last = entry.entry_id
    assert sum(len(token_ids_in(entry)) for entry in entries) == 60
    result = entries[-1].result
    assert result is not None
    assert "".join(text_in(entry) for entry in entries) == text_of(result)


def test_a_cancelled_call_leaves_no_work_behind(shared: tuple[Queue, WorkerProcess]) -> None:
    queue, _ = shared
    key, api = submit_live(queue, slow(600))
    follow(queue, api, until=3)
    queue.cancel([key])
    assert run_batch(queue, [question("What is 2 + 3?")])[0].status == 200
    wait_until(lambda: queue.read_tokens({key: FIRST_ID}) == [], 60, "the stream to be gone")


def test_the_worker_process_has_no_torch(shared: tuple[Queue, WorkerProcess]) -> None:
    _, worker = shared
    assert "libtorch" not in Path(f"/proc/{worker.pid}/maps").read_text()
    assert "libtorch" in Path(f"/proc/{worker.core_pid}/maps").read_text()


def test_an_idle_worker_uses_next_to_nothing(shared: tuple[Queue, WorkerProcess]) -> None:
    queue, worker = shared
    run_batch(queue, [question("What is 2 + 3?")])
    wait_for_rest([worker.pid, worker.core_pid], 0.01)


def test_a_worker_reports_what_its_engine_does(shared: tuple[Queue, WorkerProcess]) -> None:
    """Every few seconds; on a CPU no GPU is reported."""
    queue, worker = shared
    worker_id = worker.wait_ready().id
    gauges = wait_until(lambda: queue.gauges([worker_id]).get(worker_id), 60, "a report")
    assert gauges is not None
    assert len(gauges.metrics) == len(declared_metrics())
    assert gauges.gpus == []
