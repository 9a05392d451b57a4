"""Clients state their timeouts and never repeat a command by themselves; servers that cannot be
used are named.
"""

import asyncio
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis
import uvloop
from rq import Queue as JobQueue
from rq import SimpleWorker

from jobs.errors import SettingsError
from jobs.queue import keys
from jobs.queue.connection import (
    MAX_BLOCK_SECONDS,
    PERMISSIONS,
    blocking_twin,
    check_server,
    connect,
    connect_async,
)
from jobs.queue.request_queue import Queue
from jobs.queue.scripts import QueueUnavailable
from jobs.queue.settings import QueueSettings
from jobs.server import ServerError
from tests.support.lossy_proxy import LossyProxy
from tests.support.ports import reserved_port
from tests.support.requests import MODEL, finished, start_batch
from tests.support.sentinels import running_process
from tests.support.waiting import wait_until


def test_a_lost_reply_is_an_error_and_the_command_ran_once(redis_url: str, redis_client: redis.Redis) -> None:
    with LossyProxy(redis_url) as proxy:
        client = connect(proxy.url)
        proxy.lose(3)
        with pytest.raises(redis.ConnectionError):
            client.eval("return redis.call('RPUSH', KEYS[1], 1)", 1, "{q}:list")
    assert redis_client.llen("{q}:list") == 1


def test_a_blocking_read_outlasts_its_wait(redis_url: str) -> None:
    client = blocking_twin(connect(redis_url))
    assert client.xread({"{q}:none": "0-0"}, block=50) == []
    assert client.connection_pool.connection_kwargs["socket_timeout"] > MAX_BLOCK_SECONDS


def test_async(redis_url: str) -> None:
    async def use() -> object:
        client = connect_async(redis_url)
        await client.set("a", b"\xff")
        value = await client.get("a")
        await client.aclose()
        return value

    assert asyncio.run(use()) == b"\xff"


@pytest.mark.parametrize("killed", [False, True], ids=["", "on a connection that was killed"])
@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_command_is_cancelled_at_whatever_point(
    redis_url: str, redis_client: redis.Redis, loop_factory: Callable[[], asyncio.AbstractEventLoop], killed: bool
) -> None:
    """Also while it is being sent, in vain or not: what follows it does not run."""

    async def ask(client: redis.asyncio.Redis) -> None:
        with suppress(redis.RedisError):
            await client.execute_command("EXISTS", "a")  # type: ignore[no-untyped-call]
        await asyncio.Event().wait()

    async def cancel_after(turns: int) -> bool:
        async with connect_async(redis_url) as client:
            number = await client.client_id()
            if killed:
                redis_client.client_kill_filter(_id=number)
            task = asyncio.create_task(ask(client))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait({task}, timeout=60)
            return task.cancelled()

    async def cancel_at_every_point() -> list[int]:
        return [turns for turns in range(10) if not await cancel_after(turns)]

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        assert runner.run(cancel_at_every_point()) == []


def test_a_good_server_is_marked_with_the_schema(redis_client: redis.Redis) -> None:
    check_server(redis_client)
    check_server(redis_client)
    assert redis_client.get(keys.SCHEMA) == keys.SCHEMA_VERSION.encode()


def test_a_server_that_is_emptied_as_it_is_marked_is_a_good_one(
    redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = redis_client.set

    def mark_and_lose(*arguments: Any, **options: Any) -> Any:
        marked = mark(*arguments, **options)
        redis_client.flushall()
        return marked

    monkeypatch.setattr(redis_client, "set", mark_and_lose)
    check_server(redis_client)


def test_another_schema_is_refused(redis_client: redis.Redis) -> None:
    redis_client.set(keys.SCHEMA, "0")
    with pytest.raises(ServerError, match="schema 0"):
        check_server(redis_client)


@pytest.fixture
def evicting(redis_client: redis.Redis) -> Iterator[None]:
    """The server may evict keys from the start to the end of a test."""
    redis_client.config_set("maxmemory", "1gb")
    redis_client.config_set("maxmemory-policy", "allkeys-lru")
    yield
    redis_client.config_set("maxmemory", "0")
    redis_client.config_set("maxmemory-policy", "noeviction")


@pytest.fixture
def limited(redis_client: redis.Redis, redis_url: str) -> Iterator[Callable[..., str]]:
    """Gives the server a user with these permissions and returns the user's URL."""

    def add(*permissions: str) -> str:
        redis_client.execute_command("ACL", "SETUSER", "limited", "reset", "on", ">word", *permissions)
        return redis_url.replace("://", "://limited:word@")

    yield add
    redis_client.acl_deluser("limited")


@pytest.mark.usefixtures("evicting")
def test_a_server_that_evicts_is_refused_also_where_config_is_forbidden(
    redis_client: redis.Redis, limited: Callable[..., str]
) -> None:
    for client in (redis_client, connect(limited("~*", "+@all", "-config"))):
        with pytest.raises(ServerError, match="noeviction"):
            check_server(client)


def test_a_cluster_is_refused(tmp_path: Path) -> None:
    with (
        reserved_port() as port,
        running_process(tmp_path / "node", port, "--cluster-enabled", "yes"),
        pytest.raises(ServerError, match=r"belongs to a Redis Cluster.*use a server with cluster-enabled no"),
    ):
        check_server(connect(f"redis://127.0.0.1:{port}"))


@pytest.mark.parametrize("missing", ["-info", "-get", "resetkeys"])
def test_a_user_without_a_permission_is_told_what_it_needs(limited: Callable[..., str], missing: str) -> None:
    with pytest.raises(ServerError, match=re.escape(PERMISSIONS)) as caught:
        check_server(connect(limited("~*", "+@all", missing)))
    assert str(caught.value).startswith("The Redis user lacks a permission (")


def test_a_user_with_the_permissions_named_can_do_all(limited: Callable[..., str]) -> None:
    """With the scripts, blocking reads, asyncio and RQ; `tests/pipeline/test_redis_user.py` runs
    the processes.
    """
    client = connect(limited(*PERMISSIONS.split()))
    check_server(client)
    queue = Queue(client)
    start_batch(queue, "batch_a", 2)
    claims = queue.claim("w1", 1, 2, models=[MODEL])
    queue.commit("w1", [finished(claim) for claim in claims])
    assert queue.reap() == 0
    assert queue.control_messages("w2", "0-0", 0.01) == []
    jobs = JobQueue("jobs", connection=client)
    jobs.enqueue("os.getpid")
    SimpleWorker([jobs], connection=client).work(burst=True)
    assert not jobs.job_ids
    with pytest.raises(redis.exceptions.NoPermissionError):
        client.set("another", 1)


@pytest.mark.usefixtures("evicting")
def test_a_server_that_became_unfit_is_found_by_the_next_connection(redis_client: redis.Redis, redis_url: str) -> None:
    """Calls wait until it is set right; a process that runs does not end for it."""
    with connect(redis_url) as client:
        queue = Queue(client, QueueSettings(redis_retry_seconds=0))
        with pytest.raises(QueueUnavailable, match=r"Redis cannot be used: .* set it to noeviction"):
            queue.now()
        with pytest.raises(redis.ConnectionError, match="noeviction"):
            asyncio.run(_ping(redis_url))
        redis_client.config_set("maxmemory-policy", "noeviction")
        assert queue.now()


async def _ping(url: str) -> None:
    await connect_async(url).ping()


@pytest.mark.parametrize("url", ["redis://host/?colour=red", "redis+sentinel://host/queue?colour=red", "host:6379"])
def test_a_url_that_cannot_be_used_is_refused_at_once(url: str) -> None:
    for make in (connect, connect_async):
        with pytest.raises(SettingsError, match=r"REDIS_URL cannot be used: .*(colour|must look like)"):
            make(url)


def test_a_database_in_place_of_the_urls(redis_url: str, redis_client: redis.Redis) -> None:
    with connect(f"{redis_url}?db=1", db=2) as client:
        client.set("a", 1)
    assert redis_client.dbsize() == 0
    assert connect(f"{redis_url}?db=2").get("a") == b"1"


def test_a_server_without_a_log_is_warned_of(redis_client: redis.Redis, caplog: pytest.LogCaptureFixture) -> None:
    check_server(redis_client)
    assert not caplog.records
    redis_client.config_set("appendonly", "no")
    try:
        check_server(redis_client)
    finally:
        redis_client.config_set("appendonly", "yes")
        wait_until(lambda: not is_rewriting(redis_client), 60, "a file, without which the server does not end")
    assert "appendonly no" in caplog.text


def is_rewriting(client: redis.Redis) -> bool:
    about: Any = client.info("persistence")
    return bool(about["aof_rewrite_scheduled"] or about["aof_rewrite_in_progress"])


def test_a_database_that_the_server_does_not_have_is_named_so(redis_url: str) -> None:
    with connect(redis_url, db=99) as client, pytest.raises(redis.ConnectionError, match="no database of that number"):
        client.ping()
