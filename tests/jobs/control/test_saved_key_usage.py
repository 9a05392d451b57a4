"""What was computed for API keys, saved by the ticker: it never falls and nothing is counted twice,
whatever Redis has lost and whichever ticker saves.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import reduce
from pathlib import Path

import pytest
import redis

from jobs.control.upkeep import Upkeep
from jobs.queue import keys
from jobs.queue.request_queue import KeyUsage, Queue
from jobs.store.key_usage import FILE, larger, load_usage, save_usage
from jobs.store.storage import path_of
from tests.support.object_stores import bucket


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run of the upkeep saves."""
    monkeypatch.setattr("jobs.control.upkeep.USAGE_SECONDS", 0)


def count(queue: Queue, tokens: int, key: str = "key_a") -> None:
    queue.redis.hincrby(keys.KEY_USAGE, f"{key} completion_tokens", tokens)


def usage(tokens: int, key: str = "key_a") -> KeyUsage:
    return {key: {"completion_tokens": tokens}}


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize(("left", "added", "expected"), [(70, 0, 100), (70, 20, 100), (70, 45, 115), (0, 9, 100)])
def test_a_redis_that_went_back_is_raised_to_what_was_saved(
    queue: Queue, redis_client: redis.Redis, tmp_path: Path, left: int, added: int, expected: int, others: bool
) -> None:
    """With `left` of 100 tokens, none for an emptied one, and some `added` before the next save;
    by the ticker that saved or by another one.
    """
    upkeep = Upkeep(queue, str(tmp_path))
    count(queue, 100)
    upkeep.run_once()
    if left:
        redis_client.hset(keys.KEY_USAGE, "key_a completion_tokens", left)
    else:
        redis_client.flushall()
    count(queue, added)
    count(queue, 5, "key_b")
    if others:
        upkeep = Upkeep(queue, str(tmp_path))
    for more in (0, 1, 0):
        count(queue, more)
        upkeep.run_once()
        expected += more
        assert load_usage(tmp_path) == queue.key_usage() == usage(expected) | usage(5, "key_b")


def test_a_kill_between_any_two_steps_of_a_save_changes_nothing(
    queue: Queue, redis_client: redis.Redis, tmp_path: Path
) -> None:
    """A save raises Redis, then writes the file."""
    save_usage(tmp_path, usage(100))
    count(queue, 70)
    count(queue, 5, "key_b")
    queue.raise_key_usage(usage(100))
    Upkeep(queue, str(tmp_path)).run_once()
    assert load_usage(tmp_path) == queue.key_usage() == usage(100) | usage(5, "key_b")


@pytest.mark.parametrize("in_bucket", [False, True])
def test_a_deposed_leader_does_not_lower_the_file(
    tmp_path: Path, in_bucket: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes what it had read before the next leader saved, or at the same time."""
    monkeypatch.setattr("jobs.store.key_usage._LOCK_SECONDS", 60.0)
    with bucket() if in_bucket else nullcontext(None) as made, ThreadPoolExecutor(4) as leaders:
        store = path_of(str(tmp_path) if made is None else made.uri)
        several = [usage(tokens) | usage(tokens, f"key_{tokens}") for tokens in (7, 20, 11, 5)]
        for counts, saved in zip(several, leaders.map(lambda counts: save_usage(store, counts), several), strict=True):
            assert larger(saved, counts) == saved
        assert load_usage(store) == reduce(larger, several)
        assert save_usage(store, usage(11)) == load_usage(store) == reduce(larger, several)


def test_a_ticker_that_leads_again_goes_on_from_what_the_other_saved(
    queue: Queue, redis_client: redis.Redis, tmp_path: Path
) -> None:
    first, second = (Upkeep(queue, str(tmp_path)) for _ in range(2))
    for upkeep in (first, second):
        count(queue, 10)
        upkeep.run_once()
    redis_client.flushall()
    first.run_once()
    assert load_usage(tmp_path) == queue.key_usage() == usage(20)


def test_what_has_not_changed_is_neither_written_nor_sent(
    queue: Queue, redis_client: redis.Redis, tmp_path: Path
) -> None:
    upkeep = Upkeep(queue, str(tmp_path))
    count(queue, 10)
    upkeep.run_once()
    written = (tmp_path / FILE).stat().st_ino
    redis_client.config_resetstat()
    for _ in range(3):
        upkeep.run_once()
    assert (tmp_path / FILE).stat().st_ino == written
    assert not {"cmdstat_evalsha", "cmdstat_eval", "cmdstat_hset"} & redis_client.info("commandstats").keys()


def test_a_file_that_was_removed_is_written_with_the_next_change(queue: Queue, tmp_path: Path) -> None:
    upkeep = Upkeep(queue, str(tmp_path))
    count(queue, 10)
    upkeep.run_once()
    (tmp_path / FILE).unlink()
    count(queue, 1)
    upkeep.run_once()
    assert load_usage(tmp_path) == usage(11)
