"""Groups of tokens that follow each other without waiting, and what is done when their connection
fails.
"""

from collections.abc import Callable

import pytest
import redis

from jobs.protocol.requests import Claim, Delta
from jobs.queue.publisher import Publisher
from jobs.queue.request_queue import Queue
from tests.support.requests import MODEL, delta, request, token_ids_in

CALLS = 3


@pytest.fixture
def claims(queue: Queue) -> list[Claim]:
    for number in range(CALLS):
        queue.submit(f"live_{number}", request())
    return queue.claim("w1", 1, CALLS, models=[MODEL])


@pytest.fixture
def publisher(queue: Queue, claims: list[Claim]) -> Publisher:
    """It has a connection, and every call was accepted."""
    publisher = Publisher(queue, "w1")
    accepted = [delta(claim, 0, [], accepted=True) for claim in claims]
    publisher.start(accepted, 0)
    assert publisher.finish(accepted, 0) == []
    return publisher


def tokens_of(queue: Queue, claim: Claim) -> list[int]:
    return [token for entry in queue.read_tokens({claim.key: "0-0"}) for token in token_ids_in(entry)]


def test_a_group_is_there_before_the_next_one(queue: Queue, publisher: Publisher, claims: list[Claim]) -> None:
    for index in range(3):
        groups = [[delta(claim, index, [index], "x", index)] for claim in claims]
        for group, claim in zip(groups, claims, strict=True):
            publisher.start(group, index)
            entries = queue.read_tokens({claim.key: f"{index}-1"}, timeout=60)
            assert [token_ids_in(entry) for entry in entries] == [[index]]
        assert publisher.finish([one for group in groups for one in group], index) == []


def test_requests_that_are_lost(publisher: Publisher, claims: list[Claim]) -> None:
    lost = Delta(claims[1].key, claims[1].fence + 1, 1, [], None)
    groups = [[delta(claims[0], 0, [7])], [lost], [delta(claims[2], 0, [7])]]
    for group in groups:
        publisher.start(group, 0)
    assert publisher.finish([one for group in groups for one in group], 0) == [claims[1].key]


def cut(client: redis.Redis) -> None:
    client.client_kill_filter(_type="normal", skipme=True)


def forget_scripts(client: redis.Redis) -> None:
    client.script_flush()


@pytest.mark.parametrize("harm", [cut, forget_scripts])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_what_has_no_reply_is_published_again(
    queue: Queue,
    redis_client: redis.Redis,
    publisher: Publisher,
    claims: list[Claim],
    harm: Callable[[redis.Redis], None],
    after: int,
) -> None:
    """However many groups had gone out before."""
    for index in range(2):
        groups = [[delta(claim, index, [index], "x", index)] for claim in claims]
        for number, group in enumerate(groups):
            if (index, number) == (0, after):
                harm(redis_client)
            publisher.start(group, index)
        if (index, after) == (0, len(groups)):
            harm(redis_client)
        assert publisher.finish([one for group in groups for one in group], index) == []
    assert [tokens_of(queue, claim) for claim in claims] == [[0, 1]] * CALLS


def test_more_than_may_be_under_way(
    queue: Queue, redis_client: redis.Redis, publisher: Publisher, claims: list[Claim]
) -> None:
    """The rest follows what was started, which is neither sent again nor costs a connection."""
    queue.redis.ping()  # by the connection that the rest will take
    redis_client.config_resetstat()
    groups = [[delta(claim, 0, [5], "x" * 40_000)] for claim in claims]
    for group in groups:
        publisher.start(group, 0)
    assert publisher.finish([one for group in groups for one in group], 0) == []
    assert redis_client.info("stats")["total_connections_received"] == 0
    assert [tokens_of(queue, claim) for claim in claims] == [[5]] * CALLS
    assert redis_client.info("commandstats")["cmdstat_xadd"]["calls"] == CALLS
