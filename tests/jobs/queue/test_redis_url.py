"""URLs of a server, and of Sentinels that find it: what is read from them, refused and hidden."""

import pytest

from jobs.queue.redis_url import RedisUrl, address_of, parse_redis_url, without_secrets


@pytest.mark.parametrize(
    ("url", "parsed"),
    [
        ("redis://host:6379/2", RedisUrl("redis://host:6379/2")),
        ("unix://user:word@/run/redis.sock?db=1", RedisUrl("unix://user:word@/run/redis.sock?db=1")),
        ("redis+sentinel://a/queue", RedisUrl("redis:///?", (("a", 26379),), "queue")),
        (
            "rediss+sentinel://user:word@a:1,b/my%20queue/2?ssl_ca_certs=/ca.pem",
            RedisUrl("rediss://user:word@/2?ssl_ca_certs=/ca.pem", (("a", 1), ("b", 26379)), "my queue"),
        ),
        ("redis+sentinel://[::1]:1,[::2]/queue", RedisUrl("redis:///?", (("::1", 1), ("::2", 26379)), "queue")),
    ],
)
def test_a_url_is_read(url: str, parsed: RedisUrl) -> None:
    assert parse_redis_url(url) == parsed


@pytest.mark.parametrize(
    "url",
    [
        "localhost:6379",
        "http://host",
        "redis://host:99999",
        "unix+sentinel://host/queue",
        "redis+sentinel://host:26379",
        "redis+sentinel:///queue",
        "redis+sentinel://a,,b/queue",
        "redis+sentinel://a:x/queue",
        "redis+sentinel://a/queue/first",
    ],
)
def test_another_is_refused_with_the_forms_there_are(url: str) -> None:
    with pytest.raises(ValueError, match=r"must look like redis://.*redis\+sentinel://"):
        parse_redis_url(url)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host/0", "redis://host/0"),
        ("redis://user:word@host/0", "redis://***@host/0"),
        (
            "redis+sentinel://:word@a,b/queue?sentinel_password=other&x=1",
            "redis+sentinel://***@a,b/queue?sentinel_password=***&x=1",
        ),
    ],
)
def test_no_password_is_shown(url: str, shown: str) -> None:
    assert without_secrets(url) == shown


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://Host", "host:6379/0"),
        ("redis://user:secret@host:6379/0?socket_timeout=3", "host:6379/0"),
        ("rediss://host:6380/2", "host:6380/2"),
        ("redis://host/1?db=3", "host:6379/3"),
        ("redis://", "localhost:6379/0"),
        ("unix://user@/run/redis.sock?db=2", "/run/redis.sock/2"),
        ("redis+sentinel://b:1,a/main/4", "a:26379,b:1/main/4"),
        ("redis+sentinel://a,b:1/main/4", "a:26379,b:1/main/4"),
    ],
)
def test_the_address_does_not_depend_on_the_spelling(url: str, address: str) -> None:
    assert address_of(url) == address
