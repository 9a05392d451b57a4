"""Clients state their timeouts and never repeat a command by themselves; servers that cannot be
used are named.
"""

import asyncio

import pytest
import redis

from jobs.queue import keys
from jobs.queue.connection import MAX_BLOCK_SECONDS, blocking_twin, check_server, connect, connect_async
from jobs.server import ServerError
from tests.support.lossy_proxy import LossyProxy


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


def test_a_good_server_is_marked_with_the_schema(redis_client: redis.Redis) -> None:
    check_server(redis_client)
    check_server(redis_client)
    assert redis_client.get(keys.SCHEMA) == keys.SCHEMA_VERSION.encode()


def test_another_schema_is_refused(redis_client: redis.Redis) -> None:
    redis_client.set(keys.SCHEMA, "0")
    with pytest.raises(ServerError, match="schema 0"):
        check_server(redis_client)


def test_a_server_that_evicts_is_refused(redis_client: redis.Redis) -> None:
    redis_client.config_set("maxmemory", "1gb")
    redis_client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(ServerError, match="noeviction"):
            check_server(redis_client)
    finally:
        redis_client.config_set("maxmemory", "0")
        redis_client.config_set("maxmemory-policy", "noeviction")


def test_a_server_without_a_log_is_warned_of(redis_client: redis.Redis, caplog: pytest.LogCaptureFixture) -> None:
    check_server(redis_client)
    assert not caplog.records
    redis_client.config_set("appendonly", "no")
    try:
        check_server(redis_client)
    finally:
        redis_client.config_set("appendonly", "yes")
    assert "appendonly no" in caplog.text
