"""A bucket is one queue's: a fleet with another Redis is refused, and one whose Redis came back
empty is not.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import redis

from jobs.control.upkeep import Upkeep
from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue
from jobs.store import owner
from jobs.store.marker import StoreAway
from jobs.store.owner import StoreOwner, open_own_store
from jobs.store.storage import path_of
from tests.support.object_stores import CLOUDS, bucket, cloud, files_below
from tests.support.redis_server import running_server
from tests.support.store_batches import lines_of, serve, submit

REFUSAL = "is used by a fleet with another Redis: set REDIS_URL to that one, or name another prefix"


@pytest.fixture
def other_redis() -> Iterator[redis.Redis]:
    with running_server() as server, connect(server.url) as client:
        yield client


@pytest.fixture(params=["s3", *CLOUDS])
def remote(request: pytest.FixtureRequest) -> Iterator[str]:
    with cloud(request.param) as uri:
        yield f"{uri}/fleet"


def owner_of(client: redis.Redis, location: str) -> StoreOwner:
    return StoreOwner(Queue(client), path_of(location))


def test_another_fleet_is_refused_while_the_first_one_runs(
    remote: str, redis_client: redis.Redis, other_redis: redis.Redis
) -> None:
    first, other = owner_of(redis_client, remote), owner_of(other_redis, remote)
    assert first.renew()
    assert not other.renew()
    assert first.renew()
    for _ in range(2):
        with pytest.raises(StoreAway, match=REFUSAL):
            other.renew()
    assert first.renew()


def test_another_fleet_takes_over_when_the_first_one_was_stopped(
    remote: str, redis_client: redis.Redis, other_redis: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, other = owner_of(redis_client, remote), owner_of(other_redis, remote)
    assert first.renew()
    with monkeypatch.context() as patched:
        patched.setattr(owner, "OWNER_TIMEOUT_SECONDS", 0.0)
        assert other.renew()
    assert not first.renew()
    assert other.renew()
    with pytest.raises(StoreAway, match=REFUSAL):
        first.renew()


def test_a_redis_that_came_back_empty_keeps_its_store(remote: str, redis_client: redis.Redis) -> None:
    leader = owner_of(redis_client, remote)
    assert leader.renew()
    redis_client.flushall()
    assert leader.renew()
    assert owner_of(redis_client, remote).renew()


def test_leaders_of_one_queue_take_turns(remote: str, redis_client: redis.Redis) -> None:
    leaders = [owner_of(redis_client, remote) for _ in range(2)]
    assert all(leader.renew() for _ in range(3) for leader in leaders)


def test_a_command_waits_for_a_heartbeat_of_another_fleet(
    redis_client: redis.Redis,
    other_redis: redis.Redis,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner, "OWNER_TIMEOUT_SECONDS", 1.0)
    with bucket() as remote:
        open_own_store(Queue(redis_client), path_of(remote.uri))
        assert not caplog.messages
        open_own_store(Queue(other_redis), path_of(remote.uri))
        assert ["was last used with another Redis" in message for message in caplog.messages] == [True]


def test_a_folder_has_no_such_owner(redis_client: redis.Redis, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = str(tmp_path_factory.mktemp("folder"))
    assert owner_of(redis_client, folder).renew()
    assert files_below(folder) == []


def test_the_upkeep_of_another_fleet_rebuilds_nothing(
    redis_client: redis.Redis, other_redis: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    with bucket() as remote:
        store = path_of(remote.uri) / "store"
        serve(redis_client, "m")
        batch = submit(redis_client, path_of(remote.uri), lines_of(3)).id
        first, foreign = owner_of(redis_client, str(store)), Upkeep(Queue(other_redis), str(store))
        for _ in range(4):
            assert first.renew()
            foreign.run_once()
        assert [name for name in other_redis.scan_iter("*") if batch.encode() in name] == []
    assert [REFUSAL in message for message in caplog.messages] == [True]


def test_heartbeats_go_on_while_redis_is_away(remote: str, redis_client: redis.Redis, other_redis: redis.Redis) -> None:
    with running_server() as server, connect(server.url) as client:
        first = owner_of(client, remote)
        assert first.renew()
        assert first.renew()
        server.stop()
        other = owner_of(other_redis, remote)
        assert not other.renew()
        assert first.renew()
        with pytest.raises(StoreAway, match=REFUSAL):
            other.renew()


def test_a_full_redis_gets_an_id(remote: str, redis_client: redis.Redis) -> None:
    redis_client.config_set("maxmemory", "1")
    try:
        assert owner_of(redis_client, remote).renew()
    finally:
        redis_client.config_set("maxmemory", "0")


def test_a_store_that_takes_no_writes_keeps_its_owner(
    redis_client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    with bucket() as remote:
        upkeep = Upkeep(Queue(redis_client), f"{remote.uri}/fleet")
        assert upkeep.renew_owner()
        remote.server.read_only = True
        assert upkeep.renew_owner()
    assert "failed to write a heartbeat to the file store; retrying" in caplog.text


def test_only_time_in_which_an_owner_is_looked_at_counts(
    redis_client: redis.Redis, other_redis: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after both fleets were suspended."""
    with bucket() as remote:
        first, other = owner_of(redis_client, remote.uri), owner_of(other_redis, remote.uri)
        assert first.renew()
        assert not other.renew()
        with monkeypatch.context() as patched:
            later = time.monotonic() + 3600
            patched.setattr(owner.time, "monotonic", lambda: later)
            assert not other.renew()
        assert first.renew()


@contextmanager
def running(first: StoreOwner) -> Iterator[None]:
    """A fleet that writes its heartbeats."""
    stopping = threading.Event()

    def run() -> None:
        while not stopping.wait(0.05):
            first.renew()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()


def test_a_fleet_that_was_refused_starts_on_another_prefix(redis_client: redis.Redis, other_redis: redis.Redis) -> None:
    with bucket() as remote:
        one, two = (path_of(f"{remote.uri}/{name}") for name in ("one", "two"))
        open_own_store(Queue(redis_client), one)
        with running(owner_of(redis_client, str(one))), pytest.raises(StoreAway, match=REFUSAL):
            open_own_store(Queue(other_redis), one)
        open_own_store(Queue(other_redis), two)
