"""The URL of the queue's server, or of the Sentinels that find it.

Imports no redis-py: the command line checks a URL first.
"""

import re
from typing import NamedTuple
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

FORMS = (
    "redis://host:6379/0, rediss://host:6379/0, unix:///path/to/redis.sock or"
    " redis+sentinel://host:26379,host:26379/service/0"
)
_PORT, _SENTINEL_PORT = 6379, 26379


class RedisUrl(NamedTuple):
    """The parts of a URL."""

    server: str  # for redis-py; behind Sentinels, all but the server's address
    sentinels: tuple[tuple[str, int], ...] = ()
    service: str = ""  # the Sentinels' name for the server


def parse_redis_url(url: str) -> RedisUrl:
    """Return the parts of a URL. Raise ValueError, whose text lists the valid forms."""
    try:
        parts = urlsplit(url)
        scheme, _, finder = parts.scheme.partition("+")
        if finder == "sentinel" and scheme in ("redis", "rediss"):
            return _found_by_sentinels(scheme, parts)
        usable = parts.scheme in ("redis", "rediss", "unix") and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = False
    if not usable:
        raise ValueError(f"it must look like {FORMS}")
    return RedisUrl(url)


def address_of(url: str) -> str:
    """Return an identifier of the server and database, the same for all spellings and users.

    Raise ValueError, like `parse_redis_url`.
    """
    given = parse_redis_url(url)
    parts = urlsplit(given.server)
    path = unquote(parts.path)
    if given.sentinels:
        place = f"{','.join(sorted(f'{host}:{port}' for host, port in given.sentinels))}/{given.service}"
    elif parts.scheme == "unix":
        place, path = path, ""
    else:
        place = f"{parts.hostname or 'localhost'}:{parts.port or _PORT}"
    database = parse_qs(parts.query).get("db", [path.strip("/")])[0]
    return f"{place}/{int(database) if database.isdecimal() else 0}"


def without_secrets(url: str) -> str:
    """Return the URL without passwords, for display."""
    return re.sub(r"//.*@", "//***@", re.sub(r"(password=)[^&]*", r"\1***", url))


def _found_by_sentinels(scheme: str, parts: SplitResult) -> RedisUrl:
    login, at, hosts = parts.netloc.rpartition("@")
    service, slash, database = parts.path.strip("/").partition("/")
    if not service or (slash and not database.isdecimal()):
        raise ValueError("the service is missing, or the database is not a number")
    server = f"{scheme}://{login}{at}/{database}?{parts.query}"
    return RedisUrl(server, tuple(map(_address, hosts.split(","))), unquote(service))


def _address(host: str) -> tuple[str, int]:
    parts = urlsplit(f"//{host}")
    if not parts.hostname:
        raise ValueError("a Sentinel has no host name")
    return parts.hostname, parts.port or _SENTINEL_PORT
