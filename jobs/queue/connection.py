"""Redis clients with timeouts and retries stated, because redis-py's defaults repeat writes
silently (see `connect`).
"""

import logging
import re
from typing import Any

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from jobs.queue import keys
from jobs.server import ServerError

MAX_BLOCK_SECONDS = 5.0
"""Longest time that one blocking read may wait on the server."""

_CONNECT_TIMEOUT = 5.0
_CALL_TIMEOUT = 15.0
_OLDEST_VERSION = (7, 0)


logger = logging.getLogger(__name__)


def connect(url: str) -> redis.Redis:
    """A client for calls that do not block.

    It never retries by itself: a lost reply would repeat a write; `jobs.queue.scripts` retries.
    """
    return redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0), socket_timeout=_CALL_TIMEOUT, **_common(url))


def connect_async(url: str) -> redis.asyncio.Redis:
    """An asyncio client, with timeouts that also suit blocking reads of up to
    `MAX_BLOCK_SECONDS`.
    """
    return redis.asyncio.Redis.from_url(
        url, retry=AsyncRetry(NoBackoff(), 0), socket_timeout=_CALL_TIMEOUT, **_common(url)
    )


def blocking_twin(client: redis.Redis) -> redis.Redis:
    """A second client to the same server, for XREAD BLOCK of up to `MAX_BLOCK_SECONDS`, which its
    socket outlasts.
    """
    pool = client.connection_pool
    options = {**pool.connection_kwargs, "socket_timeout": 2 * MAX_BLOCK_SECONDS}
    return redis.Redis(connection_pool=redis.ConnectionPool(connection_class=pool.connection_class, **options))


def check_server(client: redis.Redis) -> None:
    """Raise `ServerError` unless the server is new enough, evicts nothing and holds data of this
    schema (written when there is none).
    """
    info: Any = client.info("server")
    name, version = ("Valkey", info["valkey_version"]) if "valkey_version" in info else ("Redis", info["redis_version"])
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < _OLDEST_VERSION:
        raise ServerError(
            f"The server is {name} {version}; the queue needs Redis 7.0 or Valkey 7.2 or later: upgrade it."
        )
    policy = _config(client, "maxmemory-policy")
    limit = _config(client, "maxmemory")
    if policy not in (None, "noeviction") and limit != "0":
        raise ServerError(
            f"The server may evict keys (maxmemory-policy {policy}), which loses requests: set it to noeviction."
        )
    if _config(client, "appendonly") == "no":
        logger.warning(
            "the Redis server stores nothing on disk (appendonly no): when it restarts, requests and results that only"
            " Redis stores are lost and run again"
        )
    # Asked first, because a server that is full refuses to be written to
    if not client.exists(keys.SCHEMA):
        client.set(keys.SCHEMA, keys.SCHEMA_VERSION, nx=True)
    stored: Any = client.get(keys.SCHEMA)
    if stored != keys.SCHEMA_VERSION.encode():
        raise ServerError(
            f"The Redis server holds a queue of schema {stored.decode()}, and this version reads schema"
            f" {keys.SCHEMA_VERSION}: run the version that wrote it until no batch and no live call is left, then empty"
            " the database, or use another one."
        )


def _common(url: str) -> dict[str, Any]:
    common: dict[str, Any] = {
        "protocol": 2,
        "socket_connect_timeout": _CONNECT_TIMEOUT,
        "decode_responses": False,
        "max_connections": 256,
    }
    if not url.startswith("unix:"):
        common["socket_keepalive"] = True
    return common


def _config(client: redis.Redis, name: str) -> str | None:
    try:
        answer: Any = client.config_get(name)
    except redis.ResponseError:  # managed services forbid CONFIG
        return None
    return answer.get(name) if answer else None
