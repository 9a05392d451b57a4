"""`pipeline health`: what a container's health check asks."""

import os
import signal

import pytest

from jobs.control.health import control_plane_fault
from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue
from tests.support.commands import run_pipeline, running_pipeline
from tests.support.control_plane import ControlPlane
from tests.support.waiting import wait_until


@pytest.mark.proof
def test_a_worker_is_healthy_once_it_is_ready_and_until_it_ends(redis_url: str) -> None:
    before = run_pipeline("health", "worker", redis_url=redis_url)
    assert before.returncode == 1
    assert "none is registered" in before.stderr
    with running_pipeline("worker", redis_url=redis_url, LEASE_SECONDS="2") as worker:
        worker.wait_for("worker INFO ready")
        ready = run_pipeline("health", "worker", redis_url=redis_url)
        assert (ready.returncode, ready.stdout, ready.stderr) == (0, "", "")
        (record,) = Queue(connect(redis_url)).workers()
        os.kill(record.pid, signal.SIGKILL)
        wait_until(
            lambda: run_pipeline("health", "worker", redis_url=redis_url).returncode == 1, 60, "the record to run out"
        )


def test_a_control_plane_is_healthy_while_all_of_its_processes_are(redis_url: str) -> None:
    assert "takes batches" in run_pipeline("health", "jobs", redis_url=redis_url).stderr
    plane = ControlPlane(redis_url)
    try:
        plane.start("driver")
        wait_until(
            lambda: "no ticker leads" in run_pipeline("health", "jobs", redis_url=redis_url).stderr,
            60,
            "the RQ worker",
        )
        plane.start("ticker")
        wait_until(lambda: run_pipeline("health", "jobs", redis_url=redis_url).returncode == 0, 60, "a leader")
        assert control_plane_fault(Queue(connect(redis_url)), "elsewhere") == "no process on elsewhere takes batches"
    finally:
        for name in list(plane.processes):
            plane.kill(name)


def test_a_queue_that_is_away_is_said(redis_url: str) -> None:
    done = run_pipeline("health", "worker", redis_url="redis://127.0.0.1:1/0")
    assert done.returncode == 1
    assert "Redis is out of reach" in done.stderr
    assert "Traceback" not in done.stderr
    assert run_pipeline("health", "jobs").returncode == 2
