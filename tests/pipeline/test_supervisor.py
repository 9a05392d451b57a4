"""What the supervisor of all processes does while its private Redis is away."""

import os
import signal
import socket
import sys
from pathlib import Path

import pytest
import redis

from jobs.queue.registry import WorkerRecord
from jobs.queue.settings import QueueSettings
from pipeline.errors import ChildFailed
from pipeline.supervisor import Supervisor
from tests.support.processes import command_line, descendants, is_running
from tests.support.waiting import wait_for_end, wait_until


def test_a_worker_that_dies_while_the_private_redis_is_away_holds_up_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pipeline.kept_server._LOOK_SECONDS", 600.0)  # so that it stays away
    with Supervisor(None, QueueSettings(redis_retry_seconds=600), lambda line: None) as supervisor:
        kill_redis(supervisor)
        wait_for_end(lambda: supervisor._bury(1), 60, "the try to requeue, in less than the minutes of retries")
        with pytest.raises(redis.ConnectionError):
            supervisor.queue.redis.ping()


def test_a_dead_worker_is_taken_out_of_the_registry() -> None:
    with Supervisor(None, QueueSettings(), lambda line: None) as supervisor:
        for pid in (1, 2):
            supervisor.queue.register_worker(
                WorkerRecord(f"worker-{pid}", ["demo"], "ready", 0, 0.0, socket.gethostname(), pid)
            )
        supervisor._bury(1)
        assert [record.pid for record in supervisor.queue.workers()] == [2]


def test_a_model_whose_worker_cannot_be_started_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    failures: list[ChildFailed] = []
    with Supervisor(None, QueueSettings(), said.append) as supervisor:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", str(tmp_path / "absent"))
            [child] = supervisor.start_workers([], name="demo", on_failure=failures.append)
        assert child.pid is None
        assert said[-1].startswith("the worker-demo process could not be started ([Errno 2]")
        supervisor.check()
        assert child.pid is not None
        supervisor.kill()
    assert failures == []


def test_all_but_one_process_of_the_control_plane_may_start_later() -> None:
    with Supervisor(None, QueueSettings(), lambda line: None) as supervisor:
        supervisor.start_jobs(rest_after=600)
        supervisor.check()
        assert len(control_plane(supervisor)) == 1
        supervisor.kill()
        supervisor.start_jobs(rest_after=0.1)
        wait_for_rest_of_control_plane(supervisor)


@pytest.mark.parametrize("lost", ["the RQ worker", "Redis"])
def test_the_rest_of_the_control_plane_starts_when_something_is_lost(lost: str) -> None:
    with Supervisor(None, QueueSettings(), lambda line: None) as supervisor:
        supervisor.start_jobs(rest_after=600)
        if lost == "Redis":
            kill_redis(supervisor)
        else:
            os.kill(control_plane(supervisor)[0], signal.SIGKILL)
        wait_for_rest_of_control_plane(supervisor)


def wait_for_rest_of_control_plane(supervisor: Supervisor) -> None:
    def has_started() -> bool:
        supervisor.check()
        return len(control_plane(supervisor)) == 3

    wait_until(has_started, 60, "the rest of the control plane")


def control_plane(supervisor: Supervisor) -> list[int]:
    return [child.pid for child in supervisor._children if child.pid is not None]


def kill_redis(supervisor: Supervisor) -> None:
    path = supervisor.redis_url.removeprefix("unix://")
    pid = next(pid for pid in descendants(os.getpid()) if path in command_line(pid))
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_running(pid), 60, "Redis to be gone")
