"""Following a batch while Redis goes away: killed and back with its file, and back empty."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from api.settings import ApiSettings
from jobs.batch.rebuild import rebuild_all
from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue
from jobs.queue.settings import QueueSettings
from tests.api.followed_batch import COMPLETED, LINES, PIECES, WHOLE, FollowedBatch, Steps, ends
from tests.api.scripted_worker import ScriptedWorker
from tests.support.api_server import running_api
from tests.support.event_reader import EventReader, batch_texts
from tests.support.redis_machine import RedisMachine, running_redis_machine
from tests.support.waiting import wait_until

pytestmark = pytest.mark.proof


@pytest.fixture
def machine() -> Iterator[RedisMachine]:
    with running_redis_machine() as machine:
        yield machine


@pytest.fixture
def queue(machine: RedisMachine) -> Iterator[Queue]:
    with connect(machine.url) as client:
        yield Queue(client, QueueSettings(redis_retry_seconds=30))


@pytest.fixture
def settings(machine: RedisMachine, tmp_path: Path) -> ApiSettings:
    return ApiSettings(redis_url=machine.url, file_store=str(tmp_path / "store"), ping_seconds=0.2)


@pytest.fixture
def steps(queue: Queue, scripted: Callable[..., ScriptedWorker]) -> Iterator[Steps]:
    steps = Steps()
    scripted(steps.script)
    yield steps
    steps.closed = True


def test_a_server_that_was_killed_costs_no_token(
    machine: RedisMachine, queue: Queue, settings: ApiSettings, steps: Steps, tmp_path: Path
) -> None:
    with running_api(settings) as url:
        batch = FollowedBatch(queue.redis, url, tmp_path / "input")
        batch.start()
        steps.go_on(2)
        with EventReader(url + batch.path) as reader, EventReader(url + batch.path) as cut:
            reader.wait(LINES)
            seen = cut.wait_for_id(LINES)
            cut.close()
            machine.kill()
            machine.start()
            steps.go_on(2)
            batch.finish()
            events = reader.wait_ended()
            with EventReader(url + batch.path, seen[-1].id) as again:
                rest = again.wait_ended()
    for found in (events[:-1], [*seen, *rest[:-1]]):
        assert batch_texts(found) == WHOLE
        assert ends(found) == COMPLETED


def test_a_file_store_that_is_away_ends_the_stream_of_a_batch_that_redis_lost(
    machine: RedisMachine, queue: Queue, settings: ApiSettings, steps: Steps, tmp_path: Path
) -> None:
    with running_api(settings) as url:
        batch = FollowedBatch(queue.redis, url, tmp_path / "input")
        batch.start()
        steps.go_on(1)
        with EventReader(url + batch.path) as reader:
            reader.wait(LINES)
            os.rename(settings.file_store, tmp_path / "elsewhere")
            os.mkdir(settings.file_store)
            machine.lose_everything()
            machine.start()
            *_, error, done = reader.wait_ended()
    assert (error.value["error"]["code"], done.value) == ("file_store_unavailable", None)


def test_an_empty_server_gets_the_batch_back_and_the_reader_a_new_beginning(
    machine: RedisMachine, queue: Queue, settings: ApiSettings, steps: Steps, tmp_path: Path
) -> None:
    with running_api(settings) as url:
        batch = FollowedBatch(queue.redis, url, tmp_path / "input")
        batch.start()
        steps.go_on(2)
        with EventReader(url + batch.path) as reader:
            reader.wait(LINES)
            machine.lose_everything()
            machine.start()
            assert rebuild_all(queue, settings.file_store) == (1, [])
            batch.start()
            wait_until(lambda: queue.last_of_batch(batch.id), 60, "the reader to read on")
            steps.go_on(4 * len(PIECES))  # what was begun before takes some in vain
            batch.finish()
            events = reader.wait_ended()
    assert batch_texts(events[:-1]) == WHOLE
    assert ends(events[:-1]) == COMPLETED
    assert events[-2].value["status"] == "completed"
