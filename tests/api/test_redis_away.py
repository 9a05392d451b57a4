"""A Redis that stays away for longer than the API waits."""

import asyncio
import contextlib
import gc
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import httpx
import openai
import pytest
from starlette.requests import Request

from api.fleet import Fleet
from api.http.errors import MayExist
from api.routes import batches
from api.settings import ApiSettings
from api.uploads import FileWriter
from jobs.queue import keys
from jobs.queue.connection import connect
from jobs.queue.registry import WorkerRecord
from jobs.queue.request_queue import Queue
from jobs.queue.scripts import QueueUnavailable
from jobs.queue.settings import QueueSettings
from jobs.store.file_store import FileStore, Upload
from tests.api.scripted_worker import MODEL, ScriptedWorker
from tests.support.api_server import official_client, plain_client, running_api
from tests.support.redis_machine import RedisMachine, running_redis_machine
from tests.support.waiting import wait_until

pytestmark = pytest.mark.proof

PERIOD = 5.0  # for which the API waits: longer than a busy machine holds up a process
CALLS = 64
LONGEST = 45.0  # for them together; one after the other they take PERIOD * CALLS
POLLS = 60  # more than there are threads for them
PROBE = 4.0  # twice as long as a probe may take
UPLOADS = 2
CREATES = 50  # more than the framework has threads
THREADS = 40  # that it has
UNKNOWN = f"/v1/files/file-{24 * '0'}"


def test_a_batch_is_begun_or_its_call_refused_and_never_both() -> None:
    """A client may repeat a call whose answer is not that its batch may exist."""
    no_request = cast(Request, None)
    refused, begun = threading.Lock(), threading.Lock()
    with pytest.raises(QueueUnavailable) as refusal, batches._may_exist(refused):
        raise QueueUnavailable("away")
    assert not isinstance(refusal.value, MayExist)
    with pytest.raises(QueueUnavailable, match="refused before"):
        batches._create(no_request, b"{}", refused)
    with pytest.raises(AttributeError):
        batches._create(no_request, b"{}", begun)
    with pytest.raises(MayExist), batches._may_exist(begun):
        raise QueueUnavailable("away")


@pytest.fixture
def machine() -> Iterator[RedisMachine]:
    with running_redis_machine() as machine:
        yield machine
        machine.go_on()


@pytest.fixture
def redis_url(machine: RedisMachine) -> str:
    return machine.url


@pytest.fixture
def api_url(machine: RedisMachine, tmp_path: Path) -> Iterator[str]:
    settings = ApiSettings(redis_url=machine.url, file_store=str(tmp_path / "store"), redis_retry_seconds=PERIOD)
    with running_api(settings) as url:
        yield url


@pytest.fixture
def queue(machine: RedisMachine) -> Queue:
    """The workers', which wait for longer."""
    return Queue(connect(machine.url), QueueSettings(redis_retry_seconds=30))


@contextlib.contextmanager
def killed(machine: RedisMachine) -> Iterator[None]:
    machine.kill()
    try:
        yield
    finally:
        machine.start()


@contextlib.contextmanager
def hung(machine: RedisMachine) -> Iterator[None]:
    machine.hang()
    try:
        yield
    finally:
        machine.go_on()


Away = Callable[[RedisMachine], contextlib.AbstractContextManager[None]]


def test_a_stream_that_has_begun_ends_with_an_error(
    client: openai.OpenAI, scripted: Callable[..., ScriptedWorker], machine: RedisMachine
) -> None:
    scripted(lambda claim: ["one ", "two"]).step = threading.Semaphore(1)
    stream = iter(client.completions.create(model=MODEL, prompt="x", stream=True))
    assert next(stream).choices[0].text == "one "
    with killed(machine), pytest.raises(openai.APIError) as caught:
        list(stream)
    assert caught.value.code == "queue_unavailable"


@pytest.mark.parametrize(
    ("away", "known"),
    [
        pytest.param(killed, False, id="killed, unread"),
        pytest.param(killed, True, id="killed, read before"),
        pytest.param(hung, False, id="hung, unread"),
        pytest.param(hung, True, id="hung, read before"),
    ],
)
def test_calls_that_come_together_are_refused_together(
    api_url: str, scripted: Callable[..., ScriptedWorker], machine: RedisMachine, away: Away, known: bool
) -> None:
    """`known`: the registry was read a moment ago, so calls come as far as their submission.

    Probes are answered soon meanwhile, and again with the truth when Redis is back.
    """
    scripted(lambda claim: ["one"])
    with plain_client(api_url) as http, ThreadPoolExecutor(CALLS + POLLS) as threads:
        if known:
            assert http.get("/v1/models").status_code == 200
        with away(machine):
            began = time.monotonic()
            calls = [threads.submit(_call, api_url) for _ in range(CALLS)]
            calls += [threads.submit(_poll, api_url) for _ in range(0 if known else POLLS)]
            wait_until(lambda: http.get("/health").status_code == 503, 60, "the reading before to be too old")
            probes = []
            while not all(call.done() for call in calls) or len(probes) < 3:
                asked = time.monotonic()
                assert http.get("/health").status_code == 503
                probes.append(time.monotonic() - asked)
            assert time.monotonic() - began < LONGEST
            assert sorted(probes)[len(probes) // 2] < PROBE, probes
        for answer in (call.result() for call in calls):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "queue_unavailable")
            assert int(answer.headers["retry-after"]) >= 1
        wait_until(lambda: _call(api_url).status_code == 200, 60, "calls to be answered again")
        wait_until(lambda: http.get("/health").status_code == 200, 60, "probes to be")


def test_no_call_waits_for_its_own_connection_or_a_thread(
    machine: RedisMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Connections give up after ten minutes here. Batches and files are being made as Redis hangs:
    they exist, whole, once it is back, and no client was invited to make one of them again.
    """
    settings = ApiSettings(
        redis_url=f"{machine.url}?socket_timeout=600", file_store=str(tmp_path), redis_retry_seconds=PERIOD
    )
    reached, disk, sync = threading.Semaphore(0), threading.Event(), os.fsync

    def late_sync(descriptor: int) -> None:
        reached.release()
        assert disk.wait(120)
        sync(descriptor)

    with running_api(settings) as url, ThreadPoolExecutor(2 * CREATES) as threads, plain_client(url) as http:
        form: dict[str, Any] = {"files": {"file": ("in.jsonl", b"{}\n")}, "data": {"purpose": "batch"}}
        file = http.post("/v1/files", **form).json()["id"]
        new = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = http.post("/v1/batches", json=new).json()["id"]
        monkeypatch.setattr(os, "fsync", late_sync)
        calls = [threads.submit(_ask, url, "POST", "/v1/batches", json=new) for _ in range(CREATES)]
        calls += [threads.submit(_ask, url, "POST", "/v1/files", **form) for _ in range(UPLOADS)]
        for _ in range(THREADS + UPLOADS):
            assert reached.acquire(timeout=60)
        with hung(machine):
            disk.set()
            calls += [threads.submit(_ask, url, *call) for call in _routes(batch) for _ in range(2)]
            refused = [call.result() for call in calls]
            repeated = _ask(url, "POST", "/v1/batches", json=new)
        for answer in [*refused, repeated]:
            may_be_repeated = answer.headers.get("x-should-retry") != "false"
            assert answer.status_code == 503, answer.request
            assert answer.headers.get("retry-after") == ("1" if may_be_repeated else None), answer.request
        uncertain = [answer.request for answer in refused if answer.headers.get("x-should-retry") == "false"]
        made = Counter((request.method, request.url.path) for request in uncertain)
        # Others never had a thread
        assert made == {("POST", "/v1/batches"): THREADS, ("POST", "/v1/files"): UPLOADS}
        assert "x-should-retry" not in repeated.headers  # refused before anything was done
        wait_until(lambda: http.get("/health").status_code == 200, 60, "probes to be answered again")
        wait_until(lambda: len(_listed(http, "batches")) == 1 + THREADS, 60, "the batches that were being made")
        wait_until(lambda: len(_listed(http, "files")) == 1 + UPLOADS, 60, "the files that were")
        assert {http.get(f"/v1/files/{one['id']}/content").content for one in _listed(http, "files")} == {b"{}\n"}
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_uploads_that_are_refused_as_they_begin_leave_nothing(
    machine: RedisMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ApiSettings(
        redis_url=f"{machine.url}?socket_timeout=600", file_store=str(tmp_path), redis_retry_seconds=PERIOD
    )
    reached, away, begun, begin = threading.Semaphore(0), threading.Event(), threading.Semaphore(0), FileStore.begin

    def late_begin(store: FileStore, **options: Any) -> Upload:
        reached.release()
        assert away.wait(120)
        upload = begin(store, **options)
        begun.release()
        return upload

    with running_api(settings) as url, ThreadPoolExecutor(UPLOADS) as callers, plain_client(url) as http:
        form: dict[str, Any] = {"files": {"file": ("in.jsonl", b"{}\n")}, "data": {"purpose": "batch"}}
        file = http.post("/v1/files", **form).json()["id"]
        monkeypatch.setattr(FileStore, "begin", late_begin)
        calls = [callers.submit(_ask, url, "POST", "/v1/files", **form) for _ in range(UPLOADS)]
        assert all(reached.acquire(timeout=60) for _ in calls)
        with hung(machine):
            away.set()
            answers = [call.result() for call in calls]
        assert {(answer.status_code, "x-should-retry" in answer.headers) for answer in answers} == {(503, False)}
        assert all(begun.acquire(timeout=60) for _ in calls)
        wait_until(lambda: os.listdir(tmp_path / "files") == [file], 60, "what they began to be removed")


def test_an_upload_that_fails_after_its_refusal_is_no_fault(
    machine: RedisMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = ApiSettings(
        redis_url=f"{machine.url}?socket_timeout=600", file_store=str(tmp_path), redis_retry_seconds=PERIOD
    )
    reached, away, failed = threading.Event(), threading.Event(), threading.Event()

    def late_commit(writer: FileWriter) -> None:
        reached.set()
        assert away.wait(120)
        writer.close()
        failed.set()
        raise QueueUnavailable("Redis is away")

    monkeypatch.setattr(FileWriter, "commit", late_commit)
    # Whose record of the refusal would keep the task
    monkeypatch.setattr(logging.getLogger("api.http.errors"), "disabled", True)
    with running_api(settings) as url, ThreadPoolExecutor(1) as callers, plain_client(url) as http:
        form: dict[str, Any] = {"files": {"file": ("in.jsonl", b"{}\n")}, "data": {"purpose": "batch"}}
        call = callers.submit(_ask, url, "POST", "/v1/files", **form)
        assert reached.wait(60)
        with hung(machine):
            assert call.result().status_code == 503
        away.set()
        assert failed.wait(60)
        wait_until(lambda: http.get("/health").status_code == 200, 60, "probes to be answered again")
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_calls_that_are_refused_keep_their_threads(machine: RedisMachine, tmp_path: Path) -> None:
    """However many come while Redis hangs, no more threads hang with it than the framework has."""
    settings = ApiSettings(
        redis_url=f"{machine.url}?socket_timeout=600", file_store=str(tmp_path), redis_retry_seconds=PERIOD
    )
    with running_api(settings) as url, ThreadPoolExecutor(CREATES) as callers, plain_client(url) as http:
        form: dict[str, Any] = {"files": {"file": ("in.jsonl", b"{}\n")}, "data": {"purpose": "batch"}}
        content = f"/v1/files/{http.post('/v1/files', **form).json()['id']}/content"
        before = _framework_threads()
        with hung(machine):
            assert http.get(content).content == b"{}\n"
            for _ in range(2):
                answers = list(callers.map(lambda _: _ask(url, "GET", UNKNOWN), range(CREATES)))
                assert {answer.status_code for answer in answers} == {503}
                assert len(_framework_threads() - before) <= THREADS
        wait_until(lambda: http.get(content).status_code == 200, 60, "a thread to be free again")


def test_calls_during_a_long_outage_wait_for_one_reading(machine: RedisMachine, tmp_path: Path) -> None:
    patience = 20.0
    settings = ApiSettings(redis_url=machine.url, file_store=str(tmp_path), redis_retry_seconds=patience)
    with running_api(settings) as url, hung(machine):
        assert _poll(url).status_code == 503
        began = time.monotonic()
        assert _poll(url).status_code == 503
        assert time.monotonic() - began < patience


def test_an_outage_is_not_as_old_as_the_one_before(
    machine: RedisMachine, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis is not read between the two, so no reading tells them apart."""
    monkeypatch.setattr("api.fleet._PROBE_SECONDS", 0.3)

    async def a_day_apart() -> None:
        loop = asyncio.get_running_loop()
        time_of_day = loop.time
        with contextlib.closing(Fleet(queue)) as fleet:
            with killed(machine):
                with pytest.raises(QueueUnavailable):
                    await fleet.probe()
                monkeypatch.setattr(loop, "time", lambda: time_of_day() + 24 * 3600)
                call = asyncio.create_task(fleet.snapshot())
                refused, _ = await asyncio.wait({call}, timeout=2)
                assert not refused, "refused as if Redis had been away for a day"
            assert (await call).workers == []

    asyncio.run(a_day_apart())


def test_a_moment_without_redis_is_no_failed_probe(
    api_url: str, machine: RedisMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Probes use a reading that is fresh enough for calls."""
    monkeypatch.setattr("api.fleet._FRESH_SECONDS", 600.0)
    with plain_client(api_url) as http:
        wait_until(lambda: http.get("/health").status_code == 200, 60, "a first reading")
        with hung(machine):
            assert http.get("/health").status_code == 200


def test_a_call_outlasts_a_redis_that_is_away_for_less(
    machine: RedisMachine, tmp_path: Path, scripted: Callable[..., ScriptedWorker]
) -> None:
    scripted(lambda claim: ["one"])
    settings = ApiSettings(redis_url=machine.url, file_store=str(tmp_path), redis_retry_seconds=60)
    with running_api(settings) as url, plain_client(url) as http, ThreadPoolExecutor(1) as thread:
        with killed(machine):
            call = thread.submit(_call, url)
            wait_until(lambda: http.get("/health").status_code == 503, 60, "the reading before to be too old")
            assert not call.done()
        assert call.result().status_code == 200


def _routes(batch: str) -> list[tuple[str, str]]:
    """Calls of every kind that ask Redis, less those that the reading of the registry answers."""
    reads = ["/v1/batches", f"/v1/batches/{batch}", f"/v1/batches/{batch}/stream", f"/v1/streams/{batch}/0"]
    reads += ["/v1/files", UNKNOWN, f"{UNKNOWN}/content", "/metrics"]
    writes = [("POST", f"/v1/batches/{batch}/cancel"), ("DELETE", UNKNOWN)]
    return [("GET", path) for path in reads] + writes


def _framework_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if "AnyIO" in thread.name}


def _listed(http: httpx.Client, name: str) -> list[dict[str, Any]]:
    return list(http.get(f"/v1/{name}", params={"limit": 100}).json()["data"])


def _ask(url: str, method: str, path: str, **options: Any) -> httpx.Response:
    with plain_client(url) as http:
        return http.request(method, path, **options)


def _poll(url: str) -> httpx.Response:
    with plain_client(url) as http:
        return http.get("/v1/batches")


def _call(url: str) -> httpx.Response:
    with plain_client(url) as http:
        return http.post("/v1/completions", json={"model": MODEL, "prompt": "x"})


def test_a_call_whose_client_left_meanwhile_is_cancelled_later(
    redis_url: str, queue: Queue, machine: RedisMachine
) -> None:
    queue.register_worker(WorkerRecord("busy", [MODEL], "ready", 128, 1.0, "host", 1))
    settings = ApiSettings(redis_url=redis_url, redis_retry_seconds=0.5)
    with running_api(settings) as url, official_client(url) as client, ThreadPoolExecutor(1) as pool:
        call = pool.submit(lambda: client.completions.create(model=MODEL, prompt="x"))
        wait_until(lambda: queue.redis.hlen(keys.LIVE_CALLS), 60, "the call to wait")
        machine.stop()
        assert isinstance(call.exception(60), openai.InternalServerError)
        machine.start()
        wait_until(lambda: not queue.redis.keys("*:body:live_*"), 60, "the call to be cancelled")
