"""Connections to the server that Sentinels name.

redis-py asks the Sentinels at each connect, and reconnects when a master became a replica.
"""

import re
from types import ModuleType
from typing import Any

import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.sentinel

from jobs.queue.redis_url import RedisUrl

FOUND_BY_SENTINELS = (redis.sentinel.SentinelManagedConnection, redis.asyncio.sentinel.SentinelManagedConnection)

_TIMEOUTS = {"socket_timeout": 1.0, "socket_connect_timeout": 1.0}  # after that, the next one is asked


def sentinel_pool(library: ModuleType, address: RedisUrl, options: dict[str, Any]) -> Any:
    """Return a connection pool of `library`, redis or redis.asyncio, with these `options`.

    Options that begin with `sentinel_` are for the Sentinels themselves.
    """
    own = {name.removeprefix("sentinel_"): options.pop(name) for name in list(options) if name.startswith("sentinel_")}
    options["ssl"] = options.pop("connection_class", None) is not None
    shared = {name: value for name, value in options.items() if name.startswith(("ssl", "retry", "protocol"))}
    kind = _Sentinels if library is redis else _AsyncSentinels
    sentinels = kind(address.sentinels, sentinel_kwargs={**shared, **_TIMEOUTS, **own})
    sentinels.given = tuple(sentinels.sentinels)
    return library.sentinel.SentinelConnectionPool(address.service, sentinels, **options)


class _Sentinels(redis.sentinel.Sentinel):
    """Sentinels with a short error message if they name no master, and without redis-py's race."""

    given: tuple[Any, ...] = ()

    def discover_master(self, service_name: str) -> Any:
        try:
            return super().discover_master(service_name)  # type: ignore[no-untyped-call]
        except redis.sentinel.MasterNotFoundError as error:
            raise _no_master(self, service_name, error) from None
        finally:
            _restore_lost(self)


class _AsyncSentinels(redis.asyncio.sentinel.Sentinel):
    """The same for asyncio."""

    given: tuple[Any, ...] = ()

    async def discover_master(self, service_name: str) -> Any:
        try:
            return await super().discover_master(service_name)
        except redis.asyncio.sentinel.MasterNotFoundError as error:
            raise _no_master(self, service_name, error) from None
        finally:
            _restore_lost(self)


def _restore_lost(sentinels: Any) -> None:
    """Restore Sentinels that redis-py lost from its list in a race of two threads or tasks.

    Each moves the Sentinel that answered to the front, by the positions before the other's move.
    """
    sentinels.sentinels = list(dict.fromkeys([*sentinels.sentinels, *sentinels.given]))


def _no_master(sentinels: Any, service: str, error: Exception) -> redis.ConnectionError:
    """Return a short error: redis-py's own text shows each client with all its options."""
    clients = [one.connection_pool.connection_kwargs for one in sentinels.sentinels]
    names = ", ".join(sorted(f"{client['host']}:{client['port']}" for client in clients))
    reasons = ", ".join(sorted(set(re.findall(r" - ([\w:]+)", str(error)))))
    return redis.ConnectionError(
        f"none of the Sentinels {names} names a master of {service} that is up{reasons and f' ({reasons})'}"
    )
