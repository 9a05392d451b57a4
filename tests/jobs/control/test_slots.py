"""Long and stuck jobs of `bulk` leave the small batches of others their slots."""

import time
from pathlib import Path

import pytest
import redis

from jobs.batch.client import BatchSpec, create_batch, get_batch
from jobs.control.slices import STALE_SECONDS
from jobs.control.slots import _LONG_JOBS, _MOST_JOBS, _SHORT_JOBS, Slots
from jobs.queue.request_queue import Queue
from jobs.queue.tasks import waiting_jobs
from tests.support.batch_steps import wait_for_batch
from tests.support.control_plane import Answering, check_echoes, control_plane, write_input
from tests.support.slow_file import slow_reading
from tests.support.waiting import wait_until

SMALL = 6


def create(client: redis.Redis, source: Path, folder: Path, tenant: str = "") -> str:
    folder.mkdir(exist_ok=True)
    return create_batch(
        client,
        BatchSpec(
            input=str(source),
            root=str(folder / "parts"),
            output=str(folder / "out.jsonl"),
            error_file="inline",
            models=("m",),
            tenant=tenant,
        ),
    ).id


def run_small_ones(client: redis.Redis, folder: Path) -> None:
    small = [
        create(client, write_input(folder / f"s{number}" / "in.jsonl", 10), folder / f"s{number}", "other")
        for number in range(SMALL)
    ]
    for number, batch in enumerate(small):
        assert wait_for_batch(client, batch, timeout=60).completed == 10
        assert Queue(client).batch_fields(batch).generation == 1
        check_echoes(folder / f"s{number}" / "out.jsonl", 10)


@pytest.mark.parametrize(("lines", "waiting"), [(40_000, 2), (4000, 0)], ids=["large files", "small files"])
def test_small_batches_begin_and_end_beside_files_that_are_read_slowly(
    redis_client: redis.Redis, redis_url: str, tmp_path: Path, lines: int, waiting: int
) -> None:
    """The large ones keep to their slots; small ones leave theirs as soon as they prove to be
    slow.
    """
    slow = write_input(tmp_path / "slow.jsonl", lines)
    with control_plane(redis_url, environment=slow_reading(slow, 0.01)) as plane, Answering(redis_url):
        stuck = [create(redis_client, slow, tmp_path / f"slow{number}") for number in range(_LONG_JOBS + 2)]
        wait_until(lambda: len(waiting_jobs(redis_client)) == waiting, 60, "all that have a slot to begin")
        run_small_ones(redis_client, tmp_path)
        assert {get_batch(redis_client, batch).state for batch in stuck} == {"validating"}
        assert waiting_jobs(redis_client) == {f"validate-{batch}-1" for batch in stuck[len(stuck) - waiting :]}
        plane.kill("bulk")


@pytest.mark.proof
def test_small_batches_end_while_all_processor_time_is_asked_for(
    redis_client: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    """One after the other, before the first of the large files is read."""
    large = write_input(tmp_path / "large.jsonl", 150_000)
    with control_plane(redis_url) as plane, Answering(redis_url):
        busy = [create(redis_client, large, tmp_path / f"large{number}") for number in range(_LONG_JOBS)]
        wait_until(lambda: not waiting_jobs(redis_client), 60, "all large ones to begin")
        for number in range(4):
            small = create(redis_client, write_input(tmp_path / f"{number}.jsonl", 10), tmp_path / str(number))
            assert wait_for_batch(redis_client, small, timeout=60).completed == 10
        assert {get_batch(redis_client, batch).state for batch in busy} == {"validating"}
        plane.kill("bulk")


@pytest.mark.proof
def test_a_job_that_waits_for_a_slot_is_not_taken_for_dead(
    redis_client: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    """It keeps its place and its generation for longer than one without a heartbeat does."""
    slow = write_input(tmp_path / "slow.jsonl", 40_000)
    with control_plane(redis_url, environment=slow_reading(slow, 0.01)) as plane:
        batches = [create(redis_client, slow, tmp_path / f"slow{number}") for number in range(_LONG_JOBS + 3)]
        wait_until(lambda: len(waiting_jobs(redis_client)) == 3, 60, "all slots for long jobs to be taken")
        order = redis_client.lrange("rq:queue:bulk", 0, -1)
        given_up = time.monotonic() + 3 * STALE_SECONDS
        wait_until(lambda: time.monotonic() > given_up, 60, "the time in which a dead job is found")
        assert {Queue(redis_client).batch_fields(batch).generation for batch in batches} == {1}
        assert redis_client.lrange("rq:queue:bulk", 0, -1) == order
        plane.kill("bulk")


def test_slots_are_kept_for_short_jobs_and_bounded_in_all() -> None:
    slots = Slots()
    assert slots.free() == (True, True)
    for number in range(_LONG_JOBS):
        slots.take(f"long{number}", is_long=True)
    assert slots.free() == (True, False)
    for number in range(_SHORT_JOBS):
        slots.take(f"short{number}", is_long=False)
    assert slots.free() == (False, False)
    slots.release("short0")
    assert slots.free() == (True, False)
    for number in range(_MOST_JOBS - _LONG_JOBS - _SHORT_JOBS + 1):
        slots.take(f"proved{number}", is_long=True)
    assert slots.free() == (False, False)
