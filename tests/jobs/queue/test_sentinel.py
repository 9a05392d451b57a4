"""Clients that Sentinels lead to the server: all kinds of them follow a failover, and say what is
wrong with the Sentinels.
"""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis
from rq import Queue as JobQueue
from rq import SimpleWorker

from jobs.queue import keys
from jobs.queue.connection import check_server, connect, connect_async
from jobs.queue.request_queue import Queue
from jobs.queue.scripts import QueueUnavailable
from jobs.queue.settings import QueueSettings
from tests.support.commands import run_pipeline
from tests.support.requests import MODEL, start_batch
from tests.support.sentinels import START_SECONDS, SentinelSet, ServerProcess, running_sentinels
from tests.support.waiting import wait_until

pytestmark = pytest.mark.proof

MASTER = {
    "ip": "1.1.1.1",
    "port": 1,
    "is_master": True,
    "is_sdown": False,
    "is_odown": False,
    "num-other-sentinels": 2,
}
SETTINGS = QueueSettings(redis_retry_seconds=START_SECONDS)


@pytest.fixture(scope="module")
def whole() -> Iterator[SentinelSet]:
    with running_sentinels() as sentinels:
        yield sentinels


@pytest.fixture
def sentinels(whole: SentinelSet) -> SentinelSet:
    whole.wait_whole()
    whole.master.client.flushall()
    return whole


def test_every_kind_of_client_follows_a_failover(sentinels: SentinelSet) -> None:
    """Scripts, a blocking read, asyncio, RQ's own commands and its blocking pop: each client was
    connected before, and is not notified.
    """
    with connect(sentinels.url) as client, connect(sentinels.url) as rq_client:
        check_server(client)
        queue = Queue(client, SETTINGS)
        start_batch(queue, "batch_a", 2)
        assert client.wait(1, 10_000) == 1, "the replica lacks the batch"
        received = _received_in_the_background(queue)
        jobs = JobQueue("jobs", connection=rq_client)
        jobs.enqueue("os.getpid")
        SimpleWorker([jobs], connection=rq_client).work(burst=True)

        async def over_a_failover() -> Any:
            async_client = connect_async(sentinels.url)
            await async_client.exists("{q}:x")
            await asyncio.to_thread(sentinels.fail_over)
            await asyncio.to_thread(sentinels.wait_whole)
            for _ in range(5):  # each connection of the pool may be one that the old master closed
                try:
                    return await async_client.info("replication")
                except redis.ConnectionError:
                    continue
            return None

        assert asyncio.run(over_a_failover())["role"] == "master"
        assert len(queue.claim("w1", 1, 2, models=[MODEL])) == 2
        assert sentinels.master.client.exists(keys.LEASES)
        queue.commands([("XADD", keys.control("w2"), "*", "k", "bell", "v", "")])
        wait_until(lambda: received, START_SECONDS, "the blocking read to go on at the new master")
        assert client.info("server")["run_id"] == sentinels.master.client.info("server")["run_id"]  # type: ignore[index]
        wait_until(lambda: _is_enqueued(jobs), START_SECONDS, "RQ at the new master")
        SimpleWorker([jobs], connection=rq_client).work(burst=True)
        assert not jobs.job_ids
        queue.close()


def _received_in_the_background(queue: Queue) -> list[object]:
    received: list[object] = []

    def listen() -> None:
        while not received:
            received.extend(queue.control_messages("w2", "0-0", 5.0))

    threading.Thread(target=listen, daemon=True).start()
    return received


def _is_enqueued(jobs: JobQueue) -> bool:
    try:
        return jobs.enqueue("os.getpid") is not None
    except redis.ConnectionError:
        return False


def test_a_write_to_a_demoted_master_is_repeated_at_the_new_one(sentinels: SentinelSet) -> None:
    """As if no Sentinel had closed the connection: the old master itself answers READONLY."""
    with connect(sentinels.url) as client, sentinels.without_failovers():
        queue = Queue(client, SETTINGS)
        start_batch(queue, "batch_a", 1)
        assert client.wait(1, 10_000) == 1, "the replica lacks the batch"
        old = sentinels.master
        old.client.replicaof("127.0.0.1", next(one.port for one in sentinels.servers if one is not old))
        claimed = threading.Thread(target=lambda: queue.claim("w1", 1, 1, models=[MODEL]), daemon=True)
        claimed.start()
        wait_until(lambda: "errorstat_READONLY" in old.client.info("errorstats"), START_SECONDS, "a refusal")
        sentinels.fail_over()
        claimed.join(START_SECONDS)
        assert not claimed.is_alive()
        assert sentinels.master is not old
        assert sentinels.master.client.exists(keys.LEASES)


def test_a_command_takes_the_url(sentinels: SentinelSet) -> None:
    done = run_pipeline("status", redis_url=sentinels.url)
    assert done.returncode == 0, done.stderr


def test_a_replica_that_sentinels_name_is_not_used(sentinels: SentinelSet) -> None:
    """They may notice a failover later than the servers."""
    master = sentinels.master.client
    with connect(sentinels.url) as client, sentinels.without_failovers():
        master.replicaof("127.0.0.1", 1)
        try:
            with pytest.raises(redis.ConnectionError, match="is a replica"):
                client.ping()
        finally:
            master.replicaof("NO", "ONE")


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        (
            "redis+sentinel://127.0.0.1:1,127.0.0.1:2/queue",
            r"none of the Sentinels 127\.0\.0\.1:1, 127\.0\.0\.1:2 names a master of queue that is up"
            r" \(network:ConnectionError\)$",
        ),
        ("{url}x", r"none of the Sentinels .* names a master of queuex that is up$"),
    ],
)
def test_what_is_wrong_with_the_sentinels_is_said(sentinels: SentinelSet, url: str, sentence: str) -> None:
    given = url.format(url=sentinels.url.removesuffix("/0"))
    with connect(given) as client, pytest.raises(redis.ConnectionError, match=sentence):
        client.ping()
    with pytest.raises(QueueUnavailable, match=sentence):
        Queue(connect(given), QueueSettings(redis_retry_seconds=0)).now()

    async def ask() -> None:
        await connect_async(given).ping()

    with pytest.raises(redis.ConnectionError, match=sentence):
        asyncio.run(ask())


def test_no_sentinel_is_lost_where_clients_ask_at_once_and_the_first_is_down() -> None:
    with connect("redis+sentinel://a:1,b:2,c:3/m") as client:
        manager, both = client.connection_pool.sentinel_manager, threading.Barrier(2)

        def answer() -> dict[str, Any]:
            both.wait(60)  # each moves it to the front only after that
            return {"m": MASTER}

        manager.sentinels[0].sentinel_masters = _refuse
        manager.sentinels[1].sentinel_masters = answer
        with ThreadPoolExecutor(2) as threads:
            assert set(threads.map(lambda _: manager.discover_master("m"), range(2))) == {("1.1.1.1", 1)}
        assert _ports(manager) == [1, 2, 3]


def test_no_sentinel_is_lost_where_tasks_ask_at_once_and_the_first_is_down() -> None:
    manager, asked = connect_async("redis+sentinel://a:1,b:2,c:3/m").connection_pool.sentinel_manager, list[str]()

    async def refuse() -> None:
        _refuse()

    async def answer() -> dict[str, Any]:
        asked.append("b")
        while len(asked) < 2:
            await asyncio.sleep(0)
        return {"m": MASTER}

    async def ask_at_once() -> None:
        manager.sentinels[0].sentinel_masters = refuse
        manager.sentinels[1].sentinel_masters = answer
        await asyncio.gather(*(manager.discover_master("m") for _ in range(2)))

    asyncio.run(ask_at_once())
    assert _ports(manager) == [1, 2, 3]


def test_sentinels_and_servers_with_passwords_of_their_own(sentinels: SentinelSet) -> None:
    _set_password("of-sentinels", *sentinels.sentinels)
    _set_password("of-servers", *sentinels.servers)
    try:
        url = sentinels.url.replace("://", "://:of-servers@")
        check_server(connect(f"{url}?sentinel_password=of-sentinels"))
        with pytest.raises(redis.ConnectionError, match=r"names a master .* \(auth:Auth"):
            connect(url).ping()
    finally:
        _set_password(None, *sentinels.sentinels, *sentinels.servers)


def _refuse() -> None:
    raise redis.ConnectionError("refused")


def _ports(manager: Any) -> list[int]:
    return sorted(one.connection_pool.connection_kwargs["port"] for one in manager.sentinels)


def _set_password(password: str | None, *processes: ServerProcess) -> None:
    for one in processes:
        one.client.acl_setuser("default", enabled=True, nopass=password is None, passwords=password and f"+{password}")
