"""Redis clients with explicit timeouts and retries, since redis-py's defaults silently repeat
writes.

Every new connection checks its server first: after an outage, another server may answer.
"""

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import redis
import redis.asyncio
import redis.sentinel
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from jobs.errors import SettingsError
from jobs.queue import keys
from jobs.queue.redis_url import parse_redis_url
from jobs.queue.scripts import QueueUnavailable
from jobs.queue.sentinels import FOUND_BY_SENTINELS, sentinel_pool
from jobs.server import ServerError

MAX_BLOCK_SECONDS = 5.0
"""Longest time that one blocking read waits on the server."""

PERMISSIONS = "~{q}* ~rq:* &rq:* +@all -@admin -@dangerous +info +client|list"
"""Permissions that a Redis user needs, in the form of ACL SETUSER."""

_OPTIONS: dict[str, Any] = {
    "protocol": 2,
    "socket_timeout": 15.0,
    "socket_connect_timeout": 5.0,
    "decode_responses": False,
}
_ENCRYPTED = (redis.SSLConnection, redis.asyncio.SSLConnection)
_LOCAL = (redis.UnixDomainSocketConnection, redis.asyncio.UnixDomainSocketConnection)
_CUT = re.compile("reset by peer|broken pipe|closed by server|lost connection|Protocol Error", re.IGNORECASE)
_MAX_CONNECTIONS = 256
_OLDEST_VERSION = (7, 0)

logger = logging.getLogger(__name__)


def connect(url: str, *, db: int | None = None) -> redis.Redis:
    """Return a client for calls that do not block; `db` replaces the URL's database.

    The client never retries: a lost reply would repeat a write. `jobs.queue.scripts` retries.
    """
    return redis.Redis.from_pool(_pool(redis, url, db, Retry(NoBackoff(), 0), _check_new))


def connect_async(url: str, *, connections: int = _MAX_CONNECTIONS) -> redis.asyncio.Redis:
    """Return an asyncio client for blocking reads of up to `MAX_BLOCK_SECONDS`.

    Each blocking read uses one of its `connections`.
    """
    pool = _pool(redis.asyncio, url, None, AsyncRetry(NoBackoff(), 0), _check_new_async, connections)
    return redis.asyncio.Redis.from_pool(pool)


def blocking_twin(client: redis.Redis) -> redis.Redis:
    """Return a second client to the same server for blocking reads of up to `MAX_BLOCK_SECONDS`.

    Its socket timeout is longer than that.
    """
    return twin(client, socket_timeout=2 * MAX_BLOCK_SECONDS)


def twin(client: redis.Redis, **changes: Any) -> redis.Redis:
    """Return a second client to the same server, with other timeouts or another database."""
    pool = client.connection_pool
    options = {**pool.connection_kwargs, "connection_class": pool.connection_class, **changes}
    if isinstance(pool, redis.sentinel.SentinelConnectionPool):
        return redis.Redis.from_pool(type(pool)(pool.service_name, pool.sentinel_manager, **options))
    return redis.Redis.from_pool(redis.ConnectionPool(**options))


def check_server(client: redis.Redis) -> None:
    """Raise `ServerError` unless the server can hold the queue for this user, with data of this
    schema.

    Writes the schema version if none is stored.
    """
    try:
        with _explained(), _wrong_encryption(client.connection_pool.connection_class):
            info: Any = client.info()
            _judge(info)
            # Read before writing: a server that is full refuses writes.
            stored: Any = client.get(keys.SCHEMA)
            if stored is None and not client.set(keys.SCHEMA, keys.SCHEMA_VERSION, nx=True):
                stored = client.get(keys.SCHEMA)
    except _UnfitServer as error:
        raise ServerError(str(error)) from None
    if not info.get("aof_enabled"):
        logger.warning(
            "the Redis server stores nothing on disk (appendonly no): when it restarts, requests and results that only"
            " Redis stores are lost and run again"
        )
    if stored not in (None, keys.SCHEMA_VERSION.encode()):
        raise ServerError(
            f"The Redis server holds a queue of schema {stored.decode()}, and this version reads schema"
            f" {keys.SCHEMA_VERSION}: run the version that wrote it until no batch and no live call is left, then empty"
            " the database, or use another one."
        )


class _Cancellable:
    """Mixin for redis-py's asyncio connections that makes a command cancellable at any point.

    redis-py sends with `asyncio.wait_for`, which on Python 3.11 loses a cancellation that comes
    just after the last byte, or just as sending fails. The task would go on forever.
    """

    async def send_packed_command(self, *arguments: Any, **options: Any) -> None:
        """Send, then raise a cancellation that came meanwhile, also in place of an error."""
        base: Any = super()
        task = asyncio.current_task()
        assert task is not None
        earlier = task.cancelling()
        try:
            await base.send_packed_command(*arguments, **options)
        except Exception as error:
            if task.cancelling() > earlier:
                raise asyncio.CancelledError from error
            raise
        if task.cancelling() > earlier:
            await base.disconnect(nowait=True)  # no other command may read this reply
            raise asyncio.CancelledError


class _UnfitServer(QueueUnavailable, redis.ConnectionError):
    """The server that answered cannot hold a queue. Calls retry, since an operator may fix it."""


def _pool(
    library: ModuleType,
    url: str,
    db: int | None,
    retry: object,
    on_connect: Callable[[Any], object],
    connections: int = _MAX_CONNECTIONS,
) -> Any:
    """Return a connection pool of `library`, redis or redis.asyncio, which use the same class
    names.
    """
    try:
        address = parse_redis_url(url)
        options = {**_OPTIONS, "retry": retry, **library.connection.parse_url(address.server)}
        options |= {"redis_connect_func": on_connect, "max_connections": connections}
        if db is not None:
            options["db"] = db
        if "path" not in options:
            options["socket_keepalive"] = True
        pool = sentinel_pool(library, address, options) if address.sentinels else library.ConnectionPool(**options)
        pool.connection_class(**pool.connection_kwargs)  # reads the options
        if library is redis.asyncio:
            sentinels = pool.sentinel_manager.sentinels if address.sentinels else ()
            for one in (pool, *(sentinel.connection_pool for sentinel in sentinels)):
                one.connection_class = type("CancellableConnection", (_Cancellable, one.connection_class), {})
    except (TypeError, ValueError) as error:
        raise SettingsError(f"REDIS_URL cannot be used: {error}; its options are those of redis-py") from None
    return pool


def _check_new(connection: Any) -> None:
    with _explained():
        with _wrong_encryption(type(connection)):
            connection.on_connect()
            connection.send_command("INFO")
            info = connection.read_response()
        _judge(_parse(info), connection)


async def _check_new_async(connection: Any) -> None:
    with _explained():
        with _wrong_encryption(type(connection)):
            await connection.on_connect()
            await connection.send_command("INFO")
            info = await connection.read_response()
        _judge(_parse(info), connection)


@contextlib.contextmanager
def _wrong_encryption(kind: type) -> Iterator[None]:
    """Add to the error of a first exchange what a wrong scheme of the URL looks like."""
    try:
        yield
    except (redis.ConnectionError, redis.TimeoutError, redis.exceptions.InvalidResponse) as error:
        said = str(error)
        if not issubclass(kind, _ENCRYPTED + _LOCAL) and _CUT.search(said) and "://" not in said:
            raise redis.ConnectionError(
                f"{said.rstrip('.')}: if the port wants TLS, use rediss:// in the URL"
            ) from error
        if issubclass(kind, _ENCRYPTED) and isinstance(error, redis.TimeoutError):
            raise redis.TimeoutError(f"{said}: if the port has no TLS, use redis:// in the URL") from error
        raise


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except redis.exceptions.NoPermissionError as error:
        raise _UnfitServer(f"The Redis user lacks a permission ({error}): it needs {PERMISSIONS}") from None
    except redis.exceptions.ResponseError as error:
        if "DB index" not in str(error):
            raise
        raise _UnfitServer(
            "The server has no database of that number (its setting `databases` is their count): use a smaller"
            " one in the Redis URL or --rq-db."
        ) from None


def _parse(info: bytes) -> dict[str, str]:
    return dict(line.split(":", 1) for line in info.decode(errors="replace").splitlines() if ":" in line)


def _judge(info: Mapping[str, Any], connection: Any = None) -> None:
    """Raise `_UnfitServer` if INFO shows that the server cannot hold a queue.

    INFO contains all that is needed, also where CONFIG is forbidden, as in managed services. A
    server that Sentinels name must be a master: they may notice a role change later than the
    server.
    """
    if "sentinel" in (info.get("redis_mode"), info.get("server_mode")):
        raise _UnfitServer("The server is a Sentinel: use redis+sentinel://host:26379/SERVICE, SERVICE being its name.")
    name, version = ("Valkey", info["valkey_version"]) if "valkey_version" in info else ("Redis", info["redis_version"])
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < _OLDEST_VERSION:
        raise _UnfitServer(
            f"The server is {name} {version}; the queue needs Redis 7.0 or Valkey 7.2 or later: upgrade it."
        )
    if str(info.get("cluster_enabled")) == "1":
        raise _UnfitServer(
            "The server belongs to a Redis Cluster, which would spread the keys of one batch over its nodes: use a"
            " server with cluster-enabled no, with replicas behind Sentinel for failover."
        )
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction" and str(info.get("maxmemory")) != "0":
        raise _UnfitServer(
            f"The server may evict keys (maxmemory-policy {policy}), which loses requests: set it to noeviction."
        )
    if isinstance(connection, FOUND_BY_SENTINELS) and info.get("role") != "master":
        raise redis.ConnectionError(
            f"{connection.host}:{connection.port} is a replica; its Sentinels have not named a master yet"
        )
