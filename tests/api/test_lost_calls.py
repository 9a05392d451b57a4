"""Calls whose Redis goes away or comes back late, without HTTP around them: what the client gets,
and what is left of them.
"""

import asyncio
import gc
import json
import threading
from typing import Any

import pytest
import redis

from api.fleet import Fleet
from api.live_call import LiveCall
from api.reader import Reader
from api.settings import ApiSettings
from api.state import ApiState
from jobs.batch.retention import forget_output
from jobs.protocol.completions import COMPLETIONS
from jobs.protocol.requests import StreamEntry, TokenChunk
from jobs.protocol.results import Result, Usage
from jobs.protocol.validation import parse_call
from jobs.queue import keys
from jobs.queue.connection import connect, connect_async
from jobs.queue.request_queue import Queue
from jobs.queue.scripts import QueueFull
from jobs.queue.settings import QueueSettings
from jobs.store.api_keys import KeyRing
from jobs.store.file_store import FileStore
from tests.support.redis_server import running_server

MODEL = "m"
BODY: dict[str, Any] = {"model": MODEL, "prompt": "x", "stream": True}
RAW = json.dumps(BODY).encode()


def live_call(url: str, queue: Queue) -> LiveCall:
    """A call of an API process whose reader does not run."""
    client = connect_async(url)
    settings = ApiSettings.from_environment(redis_url=url)
    files, ring = FileStore(queue, settings.file_store, forget_output), KeyRing(settings.file_store)
    fleet = Fleet(queue)
    reader = Reader(client, queue, fleet.short_retry_queue)
    state = ApiState(settings, queue, client, reader, fleet, files, ring)
    return LiveCall(state, parse_call(COMPLETIONS, BODY))


@pytest.mark.parametrize("gone", [True, False], ids=["gone", "failing"])
def test_a_stream_whose_catching_up_fails_ends_with_an_error(gone: bool) -> None:
    async def stream() -> list[bytes]:
        with running_server() as server:
            client = connect(server.url)
            call = live_call(server.url, Queue(client, QueueSettings(redis_retry_seconds=0.1)))
            await call.submit(RAW)
            events = call.events(StreamEntry(call.key, "1-0", [TokenChunk(0, 0, [5], "some", 0)]))
            received = [await anext(events)]
            if gone:
                server.stop()
            else:
                client.set(keys.tokens(str(call.key)), "no stream")
            assert call._inbox is not None
            call._inbox.look()
            return received + [event async for event in events]

    text, error, end = asyncio.run(stream())
    assert b'"some"' in text
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "queue_unavailable"
    assert end == b"data: [DONE]\n\n"


@pytest.mark.parametrize("again", [False, True], ids=["at first", "again"])
def test_nothing_is_left_of_a_call_that_was_submitted_after_its_client_had_left(
    redis_url: str, redis_client: redis.Redis, queue: Queue, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis is full when the client leaves, and has room later: what would cancel the call gets
    through before its submission.
    """
    monkeypatch.setattr("api.live_call._SILENCE_SECONDS", 0.05)

    async def leave() -> str:
        call = live_call(redis_url, queue)
        if again:
            await call.submit(RAW)
            redis_client.flushall()
        redis_client.config_set("maxmemory", 1)
        redis_client.config_resetstat()
        waiting = asyncio.create_task(_waited_for(call, again))
        while "errorstat_OOM" not in redis_client.info("errorstats"):
            await asyncio.sleep(0.01)
        waiting.cancel()
        # As long as it is too early to cancel, it does not end
        await asyncio.wait({waiting}, timeout=0.5)
        redis_client.config_set("maxmemory", 0)
        await asyncio.gather(waiting, return_exceptions=True)
        return call.key.batch

    try:
        name = asyncio.run(asyncio.wait_for(leave(), 60))
    finally:
        redis_client.config_set("maxmemory", 0)
    assert redis_client.lrange(keys.live(MODEL), 0, -1) == []
    assert list(redis_client.scan_iter(f"*{name}*")) == []


async def _waited_for(call: LiveCall, again: bool) -> None:
    """What a route does with the call."""
    try:
        if not again:
            await call.submit(RAW)
        await call.first()
    finally:
        await call.close()


def test_a_submission_that_fails_after_the_answer_has_come_is_not_a_fault(
    redis_url: str, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call was silent, and is submitted again as Redis fills; its answer comes meanwhile."""
    monkeypatch.setattr("api.live_call._SILENCE_SECONDS", 0.05)
    monkeypatch.setattr("api.live_call._WORKER_CHECK_SECONDS", 0.2)

    async def answered() -> tuple[Result, list[dict[str, Any]]]:
        faults: list[dict[str, Any]] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: faults.append(context))
        call, looked = live_call(redis_url, queue), asyncio.Event()
        submitting, again = threading.Event(), threading.Event()
        await call.submit(RAW)

        async def forgotten(*_: object) -> bool:
            return False

        async def is_served(*_: object, **__: object) -> None:
            if submitting.is_set():  # a machine that was held up may ask before
                looked.set()

        def late(_: LiveCall) -> None:
            submitting.set()
            assert again.wait(60)
            raise QueueFull("Redis is full")

        monkeypatch.setattr(ApiState, "knows", forgotten)
        monkeypatch.setattr(Fleet, "require", is_served)
        monkeypatch.setattr(LiveCall, "_submit_now", late)
        first = asyncio.create_task(call.first())
        await looked.wait()
        submission, inbox = call._submitting, call._inbox
        assert inbox is not None
        assert submission is not None
        assert not submission.done()
        inbox.put(StreamEntry(call.key, "0-1", [], result=Result(200, b"{}", Usage(), "req_1")))
        inbox.deliver()
        result = await call.result(await first)
        await call.close()
        again.set()
        await asyncio.wait({submission})
        del call, first, submission, inbox
        gc.collect()
        await asyncio.sleep(0)
        return result, faults

    result, faults = asyncio.run(asyncio.wait_for(answered(), 60))
    assert (result.status, faults) == (200, [])
