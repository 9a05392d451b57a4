"""A reply that is lost on its way: the call was carried out, its caller does not know it, and calls
again. Nothing may come of that.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from jobs.control.ticker import Ticker
from jobs.protocol.requests import Claim, RequestKey
from jobs.protocol.results import ApiError
from jobs.queue import keys
from jobs.queue.connection import connect
from jobs.queue.registry import WorkerRecord
from jobs.queue.request_queue import Queue
from jobs.queue.scripts import Scripts
from jobs.queue.settings import QueueSettings
from jobs.store.leases import hold
from tests.support.batch_steps import answer_all, begin, step, tick
from tests.support.control_plane import check_echoes, write_input
from tests.support.dump import Dump
from tests.support.integrity import faults
from tests.support.lossy_proxy import LossyProxy
from tests.support.lua_scripts import NAMES
from tests.support.requests import MODEL, delta, finished, held, lines, request

SOCKET_SECONDS = 0.2
DEAD_LETTER = ApiError(500, "It ended the engine.", "server_error", code="engine_crashed").result("req_1")
WAYS = [pytest.param(LossyProxy.lose, id="closed"), pytest.param(LossyProxy.swallow, id="swallowed")]


def impatient(url: str) -> redis.Redis:
    """A client that gives a reply up soon."""
    client = connect(url)
    client.connection_pool.connection_kwargs["socket_timeout"] = SOCKET_SECONDS
    return client


@pytest.mark.proof
@pytest.mark.parametrize("lose", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_a_script_whose_reply_was_lost(
    redis_url: str, redis_client: redis.Redis, name: str, lose: Callable[[LossyProxy, int], None]
) -> None:
    """Every call of it is carried out twice; answers and all keys are as if there had been one."""
    answers = walk(Queue(redis_client), lambda script: None)
    left = Dump(redis_client).comparable()
    redis_client.flushall()
    calls = 0
    with LossyProxy(redis_url) as proxy:

        def before(script: str) -> None:
            nonlocal calls
            if script == name:
                calls += 1
                lose(proxy, 1)

        with impatient(proxy.url) as client:
            assert walk(Queue(client), before) == answers
        assert proxy.lost == calls > 0
    assert Dump(redis_client).comparable() == left
    assert faults(redis_client) == []


def walk(queue: Queue, before: Callable[[str], None]) -> list[Any]:
    """Calls each script once or more; what their callers rely on."""
    answers: list[Any] = []

    def call(script: str, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        before(script)
        return method(*arguments, **options)

    def claim(worker: str, seq: int, limit: int) -> list[Claim]:
        claims: list[Claim] = call("claim", queue.claim, worker, seq, limit, models=[MODEL])
        answers.append([(claim.key, claim.attempt, claim.engine_crashes, claim.checkpoint) for claim in claims])
        return claims

    answers += [call("open_batch", queue.open_batch, "t", name, 1) for name in ("batch_a", "batch_b")]
    call("register", queue.register_worker, WorkerRecord("w0", ["old"], "ready", 100, 1.0, "host", 1))
    queue.remove_worker("w0")
    answers += [call("forget_model", queue.forget_model, "old"), [model.name for model in queue.models()]]
    call("register", queue.register_worker, WorkerRecord("w1", [MODEL], "ready", 100, 1.0, "host", 1))
    answers += [call("transition", queue.create_batch, "batch_a", 9, state="in_progress")]
    answers += [call("ingest", queue.ingest, "batch_a", [(line, request()) for line in range(9)], 0, 9)]
    call("risk", queue.note_risks, {"batch_a": "urgent"})
    call("submit", queue.submit, "live_a", request(reply_to="api1"))
    claims = claim("w1", 1, 5)
    answers += [call("publish", queue.publish, "w1", [delta(claim, 0, [1, 2], "ab") for claim in claims])]
    answers += [call("renew", queue.renew, "w1", held(claims), 10)]
    call("requeue", queue.requeue, "w1", held(claims[1:2]))
    again = claim("w1", 2, 1)
    call("watch", queue.watch, again[0].key, 60)
    call("watch", queue.watch, "batch_a", 60)
    call("commit", queue.commit, "w1", [finished(claim) for claim in (claims[0], *again)])
    found = call("answers", queue.results_of, "batch_a", [again[0].key.line, claims[2].key.line], 1000)
    answers += [[result is not None for result in found]]
    call("appended", queue.note_appended, "batch_a", 5)
    call("follow", queue.follow_answers, "batch_a", 60)
    queue.commands([("UNLINK", keys.answered("batch_a"))])  # to which each call adds an empty entry
    answers += [call("drained", queue.drained, "batch_a", "part-0", [again[0].key.line])]
    outcomes = [(claims[0].key.line, False), (claims[2].key.line, True)]  # a result here, and one that is held
    call("restore", queue.restore, "batch_a", "part-1", 2, outcomes)
    call("parts", queue.set_parts, "batch_a", 0, {"part-1": 2, "part-2": 3})
    call("forget", queue.forget_streams, [RequestKey("live_a", 0)])
    for engine_crashes in range(3):  # together, alone, dead_letter
        call("quarantine", queue.quarantine, "w1", held(claims[2:] if engine_crashes == 0 else claims), DEAD_LETTER)
        claims = claim("w1", 3 + engine_crashes, 5)
    call("requeue", queue.requeue, "w1", held(claims), cleared=True)
    answers += [lines(claim("w1", 6, 2))]
    call("reap", queue.reap, "w1")
    call("reap", queue.reap)
    call("submit", queue.submit, "live_b", request(), "key_a")
    call("cancel", queue.cancel, [RequestKey("live_b", 0)])
    answers += [call("admit", queue.admit, "key_a", 2)[:2] for _ in range(3)]
    answers += [queue.token_totals(), call("transition", queue.transition, "batch_a", ["in_progress"], "cancelling")]
    call("cancel", queue.remove_unfinished, "batch_a")
    call("raise_key_usage", queue.raise_key_usage, {"key_a": {"prompt_tokens": 3, "device_microseconds": 2**40}})
    answers += [queue.key_usage()]
    queue.create_batch("batch_c", 0, tenant="t", state="failed")
    queue.announce("", "batch_c", listed=False, runs=True)
    call("clean", queue.clean, "batch_c", queue.batch_fields("batch_c"))
    queue.create_batch("batch_d", 0)
    answers += [queue.ingest_early("batch_d", [(1, request())], "1 1")]
    queue.remove_unfinished("batch_d")
    answers += [
        call("queue_id", Scripts(queue.redis, queue.settings.redis_retry_seconds).call, "queue_id", ["queue_a"])
    ]
    with hold(queue, "s3://store/batches/batch_d", 0):
        before("hold")
    answers += [call("discard", queue.discard, "batch_d", "validating", 0)]
    return answers


@pytest.fixture
def proxied_jobs(redis_url: str) -> Iterator[tuple[LossyProxy, Queue]]:
    """A queue for the control plane's jobs behind a proxy; replies to any command may be lost."""
    with LossyProxy(redis_url, scripts_only=False) as proxy, impatient(proxy.url) as client:
        yield proxy, Queue(client, QueueSettings(redis_retry_seconds=5))


@pytest.mark.parametrize("lose", [WAYS[0], pytest.param(LossyProxy.swallow, id="swallowed")])
def test_whatever_the_control_plane_does(
    redis_client: redis.Redis,
    proxied_jobs: tuple[LossyProxy, Queue],
    tmp_path: Path,
    lose: Callable[[LossyProxy, int, int], None],
    seed: int,
) -> None:
    """Each reply to it in turn, of whatever command, or where that takes long some of them: the
    batch comes out the same.
    """
    proxy, queue = proxied_jobs

    def run(folder: Path, lost: int | None) -> int:
        redis_client.flushall()
        folder.mkdir()
        source = write_input(folder / "in.jsonl", 12)
        batch = begin(redis_client, source).id
        first = proxy.replies
        if lost is not None:
            lose(proxy, 1, lost)
        for _ in range(12):  # a job that gave up runs again, as the ticker would have it
            record = step(redis_client, batch, queue)
            if record.ended:
                break
            answer_all(redis_client)
        assert (record.state, record.completed, record.failed, record.problem) == ("completed", 12, 0, None), lost
        check_echoes(folder / "out.jsonl", 12)
        tick(Ticker(Queue(redis_client)))
        assert faults(redis_client) == []
        assert queue_keys(redis_client, batch) == [f"{{q}}:batch:{batch}", "{q}:batches"], lost
        return proxy.replies - first

    replies = run(tmp_path / "undisturbed", None)
    print(f"{replies} replies")
    numbers = range(replies) if lose is LossyProxy.lose else random.Random(seed).sample(range(replies), 10)
    for number in numbers:
        run(tmp_path / str(number), number)
    assert proxy.lost > len(numbers) // 2  # the last ones may not come again


def queue_keys(client: redis.Redis, batch: str) -> list[str]:
    """What is left that has to do with batches, but for the service they received, which is soon
    forgotten.
    """
    return sorted(
        name.decode() for name in client.scan_iter("*batch*") if b"rq:" not in name and b":served:" not in name
    )
