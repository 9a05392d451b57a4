"""An outage takes few lines in the log, however often it is noticed."""

import logging

import pytest
import redis

from jobs.queue.outage_log import OutageLog

FULL = redis.exceptions.OutOfMemoryError(
    "Command # 2 (HSET rq:worker:one birth now) of pipeline caused error: command not allowed"
)


def test_an_outage_is_logged_when_it_begins_each_minute_and_when_it_ends(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    outage = OutageLog(logging.getLogger("a"), "batches wait", "batches go on")
    with caplog.at_level("INFO"):
        outage.worked()
        for _ in range(240):
            now += 0.5
            outage.failed(FULL)
            outage.worked()  # a call that a full server takes
        now += 10
        outage.worked()
        outage.worked()
    begun = "Redis unavailable; batches wait: Redis is out of memory: command not allowed"
    assert caplog.messages == [begun, begun, "Redis available again; batches go on"]


def test_a_refused_password_is_a_sentence(caplog: pytest.LogCaptureFixture) -> None:
    OutageLog(logging.getLogger("a"), "batches wait", "").failed(redis.AuthenticationError("WRONGPASS"))
    assert caplog.messages == ["Redis unavailable; batches wait: Redis refuses the user or the password: WRONGPASS"]
