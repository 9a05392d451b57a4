"""What runs too long is ended in the midst of it, and nothing else is."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time

import pytest

from tests.support.thread_starts import no_thread_starts
from workers.text.time_limit import TimeLimit, TimeLimitError

pytestmark = pytest.mark.proof

LIMIT = 0.2  # seconds


def forever() -> None:
    for _ in itertools.repeat(None):
        pass


def test_what_ends_in_time_gives_its_value() -> None:
    limit = TimeLimit(30)
    assert limit.run(lambda: 5) == 5
    with pytest.raises(KeyError):
        limit.run(lambda: {}[1])


def test_a_loop_is_ended_and_the_thread_goes_on() -> None:
    limit = TimeLimit(LIMIT)
    for _ in range(2):
        with pytest.raises(TimeLimitError):
            limit.run(forever)
        assert limit.run(lambda: sum(range(1000))) == 499500


def test_an_exception_that_was_swallowed_or_came_late_does_not_arrive_later() -> None:
    limit = TimeLimit(0.05)

    def until_then() -> str:
        with contextlib.suppress(BaseException):
            forever()
        return "swallowed"

    assert limit.run(until_then) == "swallowed"
    for length in range(40, 70):
        end = time.thread_time() + length / 1000
        with contextlib.suppress(TimeLimitError):
            limit.run(lambda end=end: [None for _ in iter(lambda: time.thread_time() > end, True)])
        sum(range(10_000))  # here nothing may be raised


def test_a_loop_is_ended_that_drops_every_exception() -> None:
    """As jinja does where it makes a text of a value that is missing."""
    end = time.monotonic() + 60

    def stubborn() -> None:
        while time.monotonic() < end:
            with contextlib.suppress(Exception):
                sum(range(1000))

    with pytest.raises(TimeLimitError):
        TimeLimit(0.05).run(stubborn)


def test_a_loop_is_ended_though_the_first_exception_was_dropped() -> None:
    """As by a destructor, in which no exception gets any further."""

    class Dropping:
        def __del__(self) -> None:
            with contextlib.suppress(BaseException):
                forever()

    def work() -> None:
        Dropping()
        forever()

    with pytest.raises(TimeLimitError):
        TimeLimit(0.05).run(work)


def test_a_loop_is_ended_after_a_thread_could_not_be_started() -> None:
    limit = TimeLimit(0.05)
    with no_thread_starts(), pytest.raises(RuntimeError, match="new thread"):
        limit.run(forever)
    with pytest.raises(TimeLimitError):
        limit.run(forever)


def test_waiting_does_not_count() -> None:
    event = threading.Event()
    assert TimeLimit(0.05).run(lambda: event.wait(0.5)) is False


def test_only_the_thread_that_takes_too_long_is_ended() -> None:
    limit = TimeLimit(LIMIT)
    ended: list[str] = []

    def loop() -> None:
        try:
            limit.run(forever)
        except TimeLimitError:
            ended.append("loop")

    threads = [threading.Thread(target=loop) for _ in range(2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert limit.run(lambda: 1) == 1
        time.sleep(0.001)
    assert ended == ["loop", "loop"]
