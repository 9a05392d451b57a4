"""Calling scripts: loading, repeating after lost replies, and what is said when Redis cannot
answer.
"""

import re
import threading
import time
from pathlib import Path

import pytest
import redis

from jobs.queue import keys
from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue
from jobs.queue.scripts import QueueUnavailable, needed, passing_reason, source
from jobs.queue.settings import QueueSettings
from tests.support.integrity import faults
from tests.support.lua_scripts import FOLDER, NAMES
from tests.support.redis_server import running_server
from tests.support.requests import MODEL, finished, held, lines, request, start_batch
from tests.support.waiting import wait_until


def test_every_file_is_a_script_and_says_what_it_takes_and_returns() -> None:
    for name in NAMES:
        header = (FOLDER / f"{name}.lua").read_text()
        assert "-- ARGV:" in header, name
        assert "-- Returns" in header, name
        assert source(name)[0].startswith("#!lua"), name


@pytest.mark.parametrize("name", NAMES)
def test_a_script_has_each_shared_function_and_constant_that_it_names(name: str) -> None:
    """What its text calls or names is declared above that."""
    shared = (FOLDER / "common.lua").read_text()
    functions = re.findall(r"^local function (\w+)", shared, re.MULTILINE)
    constants = re.findall(r"\b[A-Z][A-Z_]+\b", " ".join(re.findall(r"^local ([A-Z_, ]+) =", shared, re.MULTILINE)))
    assert len(functions) > 20
    assert len(constants) > 5
    lines = [line for line in source(name)[0].splitlines() if not line.lstrip().startswith("--")]
    for uses in (*(rf"\b{function}\(" for function in functions), *(rf"\b{constant}\b" for constant in constants)):
        first = next((line for line in lines if re.search(uses, line)), None)
        assert first is None or re.match(rf"local (function )?[\w, ]*{uses}", first), first


def test_no_script_is_longer_than_what_it_needs() -> None:
    shared = """-- About c, which a comment names
local a, b = 1, 2 -- both
local function first()
  return b
end

-- What second is for
local c = {}
local function second() return first(c) end
"""
    both, one, table, other = re.split(r"(?m)^(?=local )", re.sub(r"(?m)^--.*\n", "", shared))[1:]
    assert needed(shared, "-- second\nreturn d") == ""
    assert needed(shared, "return c[1]") == table
    assert needed(shared, "return first()") == both + one
    assert needed(shared, "return second()") == both + one + table + other


def test_key_names_are_the_same_in_lua(redis_client: redis.Redis) -> None:
    table = keys.lua_table({"LEASES", "tokens", "ready"})
    script = f"{table}\nreturn {{key.LEASES, key.tokens('b/1'), key.ready('b', 'm/x')}}"
    assert redis_client.eval(script, 0) == [
        name.encode() for name in (keys.LEASES, keys.tokens("b/1"), keys.ready("b", "m/x"))
    ]


def test_scripts_are_loaded_again_after_the_server_lost_them(queue: Queue, redis_client: redis.Redis) -> None:
    queue.submit("live_a", request())
    redis_client.script_flush()
    assert len(queue.claim("w1", 1, 1, models=[MODEL])) == 1


@pytest.mark.parametrize(
    ("setting", "said"),
    [({"maxmemory": "1"}, "out of memory"), ({"min-replicas-to-write": "1"}, "too few replicas")],
)
def test_what_the_server_refuses_is_said_and_nothing_is_half_done(
    redis_client: redis.Redis, setting: dict[str, str], said: str
) -> None:
    queue = Queue(redis_client, QueueSettings(redis_retry_seconds=0))
    start_batch(queue, "batch_a", 2)
    for name, value in setting.items():
        redis_client.config_set(name, value)
    try:
        with pytest.raises(QueueUnavailable, match=said):
            queue.submit("live_a", request())
        with pytest.raises(QueueUnavailable, match=said):
            queue.claim("w1", 1, 2, models=[MODEL])
    finally:
        for name in setting:
            redis_client.config_set(name, "0")
    assert faults(redis_client) == []
    assert lines(queue.claim("w1", 1, 2, models=[MODEL])) == [0, 1]


def test_out_of_memory_still_takes_results(redis_client: redis.Redis) -> None:
    queue = Queue(redis_client, QueueSettings(redis_retry_seconds=0))
    start_batch(queue, "batch_a", 2)
    claims = queue.claim("w1", 1, 2, models=[MODEL])
    redis_client.config_set("maxmemory", "1")
    try:
        assert queue.renew("w1", held(claims)) == []
        assert queue.commit("w1", [finished(claim) for claim in claims]) == []
        assert queue.drained("batch_a", "part-0", [0, 1])
    finally:
        redis_client.config_set("maxmemory", "0")
    assert queue.batch_fields("batch_a").completed == 2


def test_gives_up_after_the_time_given() -> None:
    client = connect("unix:///nonexistent/redis.sock")
    started = time.monotonic()
    with pytest.raises(QueueUnavailable, match="out of reach"):
        Queue(client, QueueSettings(redis_retry_seconds=0.2)).submit("live_a", request())
    assert 0.2 <= time.monotonic() - started < QueueSettings().redis_retry_seconds / 2


def test_goes_on_when_the_server_comes_back(tmp_path: Path) -> None:
    with running_server(tmp_path / "redis") as server:
        client = connect(server.url)
        queue = Queue(client, QueueSettings(redis_retry_seconds=60))
        client.ping()
        client.execute_command("CLIENT", "PAUSE", 60_000, "WRITE")
        done = threading.Event()
        thread = threading.Thread(target=lambda: (queue.submit("live_a", request()), done.set()))
        thread.start()
        other = connect(server.url)
        wait_until(lambda: any(entry["cmd"].startswith("eval") for entry in other.client_list()), 30, "the call waits")
        assert not done.is_set()
        other.execute_command("CLIENT", "UNPAUSE")
        wait_until(done.is_set, 60, "the call went through")
        thread.join()


def test_own_mistakes_are_not_repeated(redis_client: redis.Redis) -> None:
    redis_client.set(keys.LEASES, "not a zset")
    queue = Queue(redis_client)
    start_batch(queue, "batch_a", 1)
    started = time.monotonic()
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        queue.claim("w1", 1, 1, models=[MODEL])
    assert time.monotonic() - started < queue.settings.redis_retry_seconds / 2
    redis_client.flushall()


@pytest.mark.parametrize(
    ("error", "passing"),
    [
        (redis.ConnectionError("x"), True),
        (redis.TimeoutError("x"), True),
        (redis.exceptions.BusyLoadingError("x"), True),
        (redis.exceptions.ReadOnlyError("x"), True),
        (redis.exceptions.OutOfMemoryError("x"), True),
        (redis.ResponseError("MISCONF Errors writing to the AOF file"), True),
        (redis.ResponseError("OOM command not allowed"), True),
        (redis.ResponseError("UNBLOCKED force unblock from blocking operation"), True),
        (redis.AuthenticationError("x"), False),
        (redis.ResponseError("WRONGTYPE"), False),
    ],
)
def test_which_errors_pass(error: redis.RedisError, passing: bool) -> None:
    assert (passing_reason(error) is not None) == passing
