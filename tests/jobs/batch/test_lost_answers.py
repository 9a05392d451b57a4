"""A batch is submitted to a bucket whose answers are lost, and the call is repeated."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import pytest
import redis

from jobs.batch import manifest
from jobs.batch.client import BatchRecord
from jobs.batch.rebuild import rebuild_all
from jobs.batch.retention import remove_ended
from jobs.batch.submit import BatchSubmission, submit_batch, submitted_batch
from jobs.protocol.ids import BATCH, new_id
from jobs.queue import keys
from jobs.queue.request_queue import Queue, QueueUnavailable
from jobs.store.file_store import FileStore
from jobs.store.storage import StoreError, join, path_of
from tests.support.batch_steps import run_to_end
from tests.support.control_plane import failing
from tests.support.lost_answers import lost_answer
from tests.support.object_stores import bucket, files_below
from tests.support.store_batches import CHAT, check_every_line_once, lines_of, put, serve, store_of


@dataclass
class RepeatingClient:
    """Submits batches of one file."""

    redis: redis.Redis
    files: FileStore
    file_id: str

    def submit(self, batch: str) -> BatchRecord | StoreError | QueueUnavailable:
        """Return the answer: the batch, that there is none, or that there may be one."""
        new = BatchSubmission(input_file_id=self.file_id, endpoint=CHAT, completion_window="24h", seconds=86400.0)
        try:
            return submit_batch(Queue(self.redis), self.files, new, batch)
        except (StoreError, QueueUnavailable) as error:
            return error

    def repeat(self, batch: str) -> BatchRecord | None:
        """Ask again, with the same `Idempotency-Key`."""
        return submitted_batch(Queue(self.redis), self.files, "", batch)


@pytest.fixture
def client(redis_client: redis.Redis) -> Iterator[RepeatingClient]:
    with bucket() as remote:
        files = store_of(redis_client, path_of(remote.uri))
        serve(redis_client, "m")
        files.check()
        yield RepeatingClient(redis_client, files, put(files, lines_of(3)))


@pytest.mark.parametrize("away", [False, True])
def test_of_a_lost_answer_comes_a_batch_or_none(client: RepeatingClient, away: bool) -> None:
    for number in count(1):
        batch = new_id(BATCH, time.time())
        with lost_answer(number, away) as calls:
            answer = client.submit(batch)
        found = client.repeat(batch)
        assert isinstance(answer, QueueUnavailable) or isinstance(answer, BatchRecord) == (found is not None)
        assert away or not isinstance(answer, QueueUnavailable), (number, calls)
        if found is not None:
            ended = run_to_end(client.redis, batch, failing(3))
            check_every_line_once(client.redis, client.files.root.parent, ended, 3)
        else:
            rebuild_all(Queue(client.redis), str(client.files.root))
            assert batch not in Queue(client.redis).batches()
            assert Queue(client.redis).open_batches("") == []
            left = files_below(str(client.files.batch_root(batch)))
            assert away or set(left) <= {"manifest.json"}, (number, calls)
        if len(calls) < number:
            break
    assert number > 5


def test_a_batch_that_a_repeated_call_has_made_stays(client: RepeatingClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes while the first waits for an answer, and its lease has ended."""
    for number in count(1):
        batch, found = new_id(BATCH, time.time()), list[BatchRecord | None]()

        def repeat(batch: str = batch, found: list[BatchRecord | None] = found) -> None:
            client.redis.delete(keys.hold(str(client.files.batch_root(batch))))
            with monkeypatch.context() as patch:
                patch.setattr(manifest, "PROCESS", "another")
                found.append(client.repeat(batch))

        with lost_answer(number, False, repeat) as calls:
            answer = client.submit(batch)
        again = client.repeat(batch)
        assert isinstance(answer, StoreError) == (again is None), (number, calls)
        assert again is not None or found in ([], [None]), (number, calls)
        if again is not None:
            ended = run_to_end(client.redis, batch, failing(3))
            check_every_line_once(client.redis, client.files.root.parent, ended, 3)
        if len(calls) < number:
            break
    assert number > 5


def test_that_a_batch_was_given_up_is_stored_for_a_day(client: RepeatingClient) -> None:
    queue, store = Queue(client.redis), str(client.files.root)
    made, given_up = (new_id(BATCH, queue.now()) for _ in range(2))
    assert isinstance(client.submit(made), BatchRecord)
    assert client.repeat(given_up) is None
    before = files_below(join(store, "batches"))
    assert f"{given_up}/manifest.json" in before
    assert remove_ended(queue, store, queue.now() + 23 * 3600) == 0
    assert files_below(join(store, "batches")) == before
    assert remove_ended(queue, store, queue.now() + 24.5 * 3600) == 1
    assert files_below(join(store, "batches")) == [f"{made}/input.jsonl", f"{made}/manifest.json"]
