"""A lease on a key is one process' at a time."""

import redis

from jobs.queue.lease import Lease

KEY = "{q}:leader"


def test_one_has_it_until_it_ends_it(redis_client: redis.Redis) -> None:
    first, second = Lease(redis_client, KEY), Lease(redis_client, KEY)
    assert not first.extend(60)
    assert first.take(60)
    assert first.take(60)
    assert not second.take(60)
    second.end()
    assert first.extend(60)
    first.end()
    assert redis_client.exists(KEY) == 0
    assert second.take(60)
    assert not first.extend(60)


def test_it_lasts_as_long_as_it_was_last_extended_for(redis_client: redis.Redis) -> None:
    lease = Lease(redis_client, KEY)
    assert lease.take(3600)
    assert lease.extend(60)
    assert 0 < redis_client.pttl(KEY) <= 60_000
    redis_client.delete(KEY)
    assert not lease.extend(60)
    assert redis_client.exists(KEY) == 0


def test_a_clock_that_was_set_back_lengthens_no_lease(redis_client: redis.Redis) -> None:
    assert Lease(redis_client, KEY).take(3600)
    other = Lease(redis_client, KEY)
    assert not other.extend(60)
    other.end()
    assert redis_client.pttl(KEY) > 60_000
    assert not other.take(60)
    assert 0 < redis_client.pttl(KEY) <= 60_000
