"""A Redis that stays away for longer than the API waits."""

import contextlib
import threading
from collections.abc import Callable, Iterator

import openai
import pytest

from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue
from jobs.queue.settings import QueueSettings
from tests.api.scripted_worker import MODEL, ScriptedWorker
from tests.support.redis_machine import RedisMachine, running_redis_machine


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisMachine]:
    monkeypatch.setenv("REDIS_RETRY_SECONDS", "0.5")
    with running_redis_machine() as machine:
        yield machine


@pytest.fixture
def redis_url(machine: RedisMachine) -> str:
    return machine.url


@pytest.fixture
def queue(machine: RedisMachine) -> Queue:
    """The workers', which wait for longer."""
    return Queue(connect(machine.url), QueueSettings(redis_retry_seconds=30))


@contextlib.contextmanager
def away(machine: RedisMachine) -> Iterator[None]:
    machine.stop()
    try:
        yield
    finally:
        machine.start()


def test_a_stream_that_has_begun_ends_with_an_error(
    client: openai.OpenAI, scripted: Callable[..., ScriptedWorker], machine: RedisMachine
) -> None:
    scripted(lambda claim: ["one ", "two"]).step = threading.Semaphore(1)
    stream = iter(client.completions.create(model=MODEL, prompt="x", stream=True))
    assert next(stream).choices[0].text == "one "
    with away(machine), pytest.raises(openai.APIError) as caught:
        list(stream)
    assert caught.value.code == "queue_unavailable"


def test_a_new_call_is_refused(
    client: openai.OpenAI, scripted: Callable[..., ScriptedWorker], machine: RedisMachine
) -> None:
    scripted(lambda claim: ["one"])
    with away(machine), pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(model=MODEL, prompt="x")
    assert (caught.value.status_code, caught.value.code) == (503, "queue_unavailable")
