"""`pipeline tail` of one request prints its text, and how it failed."""

import threading

import pytest

from jobs.protocol.requests import RequestKey
from jobs.queue import keys
from jobs.queue.request_queue import Queue
from pipeline.errors import Refused
from pipeline.tailing import tail_target
from tests.support.requests import MODEL, delta, finished, request, start_batch
from tests.support.waiting import wait_until


@pytest.mark.parametrize(("status", "end"), [(200, "\n"), (500, "\nbatch_a/0: error 500: done\n")])
def test_a_request_is_shown_to_its_end(
    queue: Queue, redis_url: str, capsys: pytest.CaptureFixture[str], status: int, end: str
) -> None:
    start_batch(queue, "batch_a", 1)
    tail = threading.Thread(target=tail_target, args=("batch_a/0", redis_url))
    tail.start()
    wait_until(lambda: queue.redis.zscore(keys.WATCHED, str(RequestKey("batch_a", 0))), 60, "the note of a reader")
    [claim] = queue.claim("w1", 1, 1, models=[MODEL])
    queue.publish("w1", [delta(claim, 0, [1], "one ")])
    queue.commit("w1", [finished(claim, status=status, last=delta(claim, 1, [2], "two", 4))])
    tail.join(60)
    assert not tail.is_alive()
    assert capsys.readouterr().out == f"one two{end}"


@pytest.mark.parametrize("target", ["live_x", "batch_a/1"])
def test_a_request_that_is_unknown_is_refused(queue: Queue, redis_url: str, target: str) -> None:
    start_batch(queue, "batch_a", 1)
    with pytest.raises(Refused, match="is waiting or running"):
        tail_target(target, redis_url)


def test_a_line_is_shown_once_its_batch_is_in_progress(
    queue: Queue, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    queue.create_batch("batch_a", 0)
    assert queue.ingest_early("batch_a", [(1, request())], "1 1")
    with pytest.raises(Refused, match="is waiting or running"):
        tail_target("batch_a/1", redis_url)
    tail = threading.Thread(target=tail_target, args=("batch_a", redis_url))
    tail.start()
    wait_until(lambda: queue.redis.zscore(keys.WATCHED, "batch_a"), 60, "the note of a reader")
    [claim] = queue.claim("w1", 1, 1, models=[MODEL])
    queue.commit("w1", [finished(claim, last=delta(claim, 0, [1], "one"))])
    queue.transition("batch_a", ["validating"], "failed")
    tail.join(60)
    assert not tail.is_alive()
    shown = "".join(capsys.readouterr())
    assert "failed" in shown
    assert "batch_a/1" not in shown


def test_what_names_no_request_is_refused(redis_url: str) -> None:
    with pytest.raises(Refused, match="names no request"):
        tail_target("batch_a/x", redis_url)
