"""Workers and models, orders to workers, waking and watchers."""

import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis

from jobs.protocol.endpoints import ENDPOINTS
from jobs.protocol.requests import RequestKey
from jobs.queue import keys
from jobs.queue.connection import connect
from jobs.queue.registry import STOPPED_SECONDS, WorkerRecord
from jobs.queue.request_queue import Queue, QueueUnavailable
from jobs.queue.settings import QueueSettings
from jobs.queue.streams import FIRST_ID, ControlMessage
from tests.support.requests import MODEL, delta, finished, pass_time, request, start_batch, token_ids_in
from tests.support.rollback import EarlierRedis


def record(worker: str = "w1", state: str = "ready", models: list[str] | None = None) -> WorkerRecord:
    return WorkerRecord(worker, models or [MODEL], state, 2048, 1.0, "host", 1)  # type: ignore[arg-type]


def orders(queue: Queue, worker: str, after: str = FIRST_ID) -> list[ControlMessage]:
    return queue.control_messages(worker, after, 0)


class TestWorkers:
    def test_a_state_that_redis_lost_is_written_again(self, queue: Queue, redis_client: redis.Redis) -> None:
        queue.register_worker(record(state="initializing"))
        earlier = EarlierRedis(redis_client)
        queue.register_worker(record(state="ready"))
        earlier.restore()
        queue.renew("w1", [])
        assert [worker.state for worker in queue.workers()] == ["ready"]
        assert [model.name for model in queue.models()] == [MODEL]

    def test_states_are_seen_until_it_goes(self, queue: Queue, redis_client: redis.Redis) -> None:
        queue.register_worker(record(state="loading"))
        assert [worker.state for worker in queue.workers()] == ["loading"]
        assert queue.models() == []
        queue.register_worker(record(state="ready"))
        assert [worker.state for worker in queue.workers()] == ["ready"]
        queue.remove_worker("w1")
        assert queue.workers() == []
        assert [(model.name, model.max_model_len) for model in queue.models()] == [(MODEL, 2048)]
        assert {name.decode() for name in redis_client.scan_iter() if redis_client.ttl(name) < 0} <= keys.PERMANENT

    @pytest.mark.parametrize(("tasks", "urls"), [(("generate",), list(ENDPOINTS)), (("a-task-to-come",), [])])
    def test_a_model_has_the_tasks_of_its_workers_and_their_endpoints(
        self, queue: Queue, tasks: tuple[str, ...], urls: list[str]
    ) -> None:
        queue.register_worker(msgspec.structs.replace(record(), tasks=tasks))
        assert [(model.tasks, model.endpoints) for model in queue.models()] == [(tasks, urls)]

    def test_one_that_stopped_is_shown_for_a_moment(self, queue: Queue, redis_client: redis.Redis) -> None:
        queue.register_worker(record())
        queue.remove_worker("w1")
        queue.register_worker(record(state="stopped"))
        assert [worker.state for worker in queue.workers()] == ["stopped"]
        assert not redis_client.exists(keys.serving(MODEL))
        left = float(redis_client.zscore(keys.ALIVE, "w1")) / 1000 - time.time()
        assert 0 < left <= STOPPED_SECONDS

    def test_a_state_that_did_not_arrive_is_written_by_the_next_renewal(
        self, redis_client: redis.Redis, redis_url: str
    ) -> None:
        with tempfile.TemporaryDirectory() as folder:
            way = Path(folder) / "redis.sock"
            way.symlink_to(redis_url.removeprefix("unix://"))
            queue = Queue(connect(f"unix://{way}"), QueueSettings(redis_retry_seconds=0.0))
            queue.register_worker(record(state="initializing"))
            way.unlink()
            queue.redis.connection_pool.disconnect()
            with pytest.raises(QueueUnavailable):
                queue.register_worker(record(state="ready"))
            way.symlink_to(redis_url.removeprefix("unix://"))
            queue.renew("w1", [])
            queue.redis.close()
        assert [worker.state for worker in Queue(redis_client).workers()] == ["ready"]
        assert redis_client.smembers(keys.serving(MODEL)) == {b"w1"}

    def test_a_load_failure_lasts_until_the_model_is_served_or_forgotten(
        self, queue: Queue, redis_client: redis.Redis
    ) -> None:
        queue.register_worker(record(state="loading"))
        queue.note_load_failure([MODEL, "typo", "other"], "it holds no weights")
        assert queue.load_failures() == dict.fromkeys(("typo", "other"), "it holds no weights")
        assert 0 < redis_client.ttl(keys.LOAD_FAILURES) <= 24 * 3600
        queue.register_worker(record("w2", models=["other"]))
        assert queue.forget_model("typo")
        assert queue.load_failures() == {}

    @pytest.mark.parametrize("worker", ["", "a b"])
    def test_ids_that_cannot_be(self, queue: Queue, worker: str) -> None:
        with pytest.raises(ValueError, match="worker id"):
            queue.register_worker(record(worker))

    def test_one_that_is_silent_is_struck_off_and_comes_back_by_renewing(self, redis_client: redis.Redis) -> None:
        queue = Queue(redis_client, QueueSettings(lease_seconds=30.0))
        queue.reap()
        queue.register_worker(record())
        pass_time(redis_client, 3 * 30.0)
        assert queue.reap() == 0
        assert not redis_client.exists(keys.WORKERS, keys.serving(MODEL))
        assert queue.workers() == []
        queue.renew("w1", [])
        assert [worker.id for worker in queue.workers()] == ["w1"]
        assert redis_client.smembers(keys.serving(MODEL)) == {b"w1"}

    def test_is_of_an_age_that_begins_anew_where_the_server_was_emptied(
        self, queue: Queue, redis_client: redis.Redis
    ) -> None:
        queue.register_worker(record())
        redis_client.decrby(keys.REGISTRY_SINCE, 3600_000)
        queue.register_worker(record("w2"))
        assert queue.registry_age() >= 3600
        redis_client.flushall()
        queue.renew("w1", [])
        assert queue.registry_age() < 3600

    def test_is_of_an_age_where_no_worker_has_registered(self, queue: Queue, redis_client: redis.Redis) -> None:
        assert queue.registry_age() == 0
        redis_client.decrby(keys.REGISTRY_SINCE, 3600_000)
        assert queue.registry_age() >= 3600

    def test_a_record_that_is_being_written_again_does_not_outlast_its_removal(
        self, queue: Queue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        call, removal = queue._scripts.call, threading.Thread(target=queue.remove_worker, args=("w1",))

        def remove_meanwhile(name: str, arguments: list[Any]) -> Any:
            if name == "register":
                removal.start()
                removal.join(0.5)
            return call(name, arguments)

        queue.register_worker(record())
        queue.redis.flushall()
        monkeypatch.setattr(queue._scripts, "call", remove_meanwhile)
        queue.renew("w1", [])
        removal.join()
        assert queue.workers() == []

    def test_comes_back_after_the_server_was_emptied(self, queue: Queue, redis_client: redis.Redis) -> None:
        queue.register_worker(record())
        redis_client.flushall()
        queue.renew("w1", [])
        assert [worker.id for worker in queue.workers()] == ["w1"]


class TestWaking:
    def test_wakes_a_worker_that_found_too_little(self, queue: Queue) -> None:
        queue.register_worker(record())
        start_batch(queue, "batch_a", 1)
        assert orders(queue, "w1") == []
        queue.claim("w1", 1, 1, models=[MODEL])
        start_batch(queue, "batch_b", 1)
        assert orders(queue, "w1") == []  # it has what it asked for
        queue.claim("w1", 2, 5, models=[MODEL])
        start_batch(queue, "batch_c", 1)
        start_batch(queue, "batch_d", 1)
        assert [order.kind for order in orders(queue, "w1")] == ["bell"]

    def test_wakes_a_worker_for_what_others_requeue(self, queue: Queue) -> None:
        queue.register_worker(record())
        start_batch(queue, "batch_a", 1)
        queue.claim("w2", 1, 1, models=[MODEL])
        queue.claim("w1", 1, 1, models=[MODEL])
        queue.reap("w2")
        assert [order.kind for order in orders(queue, "w1")] == ["bell"]

    def test_a_live_call_reaches_busy_workers_when_none_waits(self, queue: Queue) -> None:
        queue.register_worker(record("w1"))
        queue.register_worker(record("w2", models=["other"]))
        queue.submit("live_a", request())
        assert [order.kind for order in orders(queue, "w1")] == ["bell"]
        assert orders(queue, "w2") == []

    def test_a_blocking_read_returns_it_at_once(self, queue: Queue) -> None:
        queue.register_worker(record())
        queue.claim("w1", 1, 1, models=[MODEL])
        received: list[ControlMessage] = []
        thread = threading.Thread(target=lambda: received.extend(queue.control_messages("w1", FIRST_ID, 60)))
        thread.start()
        queue.submit("live_a", request())
        thread.join(60)
        assert [order.kind for order in received] == ["bell"]

    def test_a_draining_worker_is_left_alone(self, queue: Queue) -> None:
        queue.register_worker(record())
        queue.claim("w1", 1, 1, models=[MODEL])
        queue.register_worker(record(state="draining"))
        queue.submit("live_a", request())
        assert orders(queue, "w1") == []


class TestWatch:
    def test_notifies_the_worker_and_keeps_the_finished_stream(self, queue: Queue) -> None:
        start_batch(queue, "batch_a", 2)
        claims = queue.claim("w1", 1, 2, models=[MODEL])
        key = claims[0].key
        queue.watch(key, 60)
        [order] = orders(queue, "w1")
        assert (order.kind, order.keys, order.seconds) == ("watch", [key], 60)
        queue.publish("w1", [delta(claim, 0, [1], "a") for claim in claims])
        queue.commit("w1", [finished(claim, last=delta(claim, 1, [2], "b", 1)) for claim in claims])
        entries = queue.read_tokens({claim.key: FIRST_ID for claim in claims})
        assert [(entry.key, token_ids_in(entry), entry.result is not None) for entry in entries] == [
            (key, [1], False),
            (key, [2], True),
        ]

    def test_is_known_to_the_next_worker(self, queue: Queue) -> None:
        start_batch(queue, "batch_a", 2)
        queue.watch(RequestKey("batch_a", 1), 60)
        assert [claim.watched for claim in queue.claim("w1", 1, 2, models=[MODEL])] == [False, True]

    def test_a_whole_batch(self, queue: Queue) -> None:
        queue.register_worker(record("w1"))
        start_batch(queue, "batch_a", 2)
        queue.watch("batch_a", 60)
        assert [(order.kind, order.batch) for order in orders(queue, "w1")] == [("watch", "batch_a")]
        assert all(claim.watched for claim in queue.claim("w1", 1, 2, models=[MODEL]))
