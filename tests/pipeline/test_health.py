"""`pipeline health`: what a container's health check asks."""

import os
import signal
from pathlib import Path

import httpx
import pytest

from jobs.control.health import control_plane_fault
from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue
from tests.pipeline.conftest import RunHere
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


def test_a_control_plane_is_healthy_while_all_of_its_processes_are(redis_url: str, run_here: RunHere) -> None:
    assert "takes batches" in run_here("health", "jobs", REDIS_URL=redis_url).err
    plane = ControlPlane(redis_url)
    try:
        plane.start("driver")
        wait_until(
            lambda: "no ticker leads" in run_here("health", "jobs", REDIS_URL=redis_url).err,
            60,
            "the RQ worker",
        )
        plane.start("ticker")
        wait_until(lambda: run_here("health", "jobs", REDIS_URL=redis_url).code == 0, 60, "a leader")
        connect(redis_url).flushall()  # as when Redis comes back empty
        wait_until(lambda: run_here("health", "jobs", REDIS_URL=redis_url).code == 0, 60, "keys of its processes")
        assert control_plane_fault(Queue(connect(redis_url)), "elsewhere") == "no process on elsewhere takes batches"
    finally:
        for name in list(plane.processes):
            plane.kill(name)


def test_a_queue_that_is_away_is_said(redis_url: str, run_here: RunHere) -> None:
    done = run_here("health", "worker", REDIS_URL="redis://127.0.0.1:1/0")
    assert done.code == 1
    assert "Redis is out of reach" in done.err
    assert run_here("health", "jobs", REDIS_URL="").code == 2


def test_an_api_is_asked_where_it_listens(redis_url: str, tmp_path: Path, run_here: RunHere) -> None:
    where = ("--uds", tmp_path / "api.sock")
    before = run_here("health", "api", *where)
    assert before.code == 1
    assert f"does not answer at {tmp_path}/api.sock" in before.err
    with running_pipeline("api", *where, "--file-store", tmp_path / "store", redis_url=redis_url) as api:
        api.wait_for(f"listening on http at the Unix socket {tmp_path}/api.sock")
        done = run_here("health", "api", *where)
        assert (done.code, done.err) == (0, "")
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(tmp_path / "api.sock")), timeout=60) as http:
            assert http.get("http://localhost/v1/models").status_code == 200
            refused = http.get("http://rebound.example/v1/models")
            assert refused.json()["error"]["code"] == "host_not_allowed"
    assert not (tmp_path / "api.sock").exists()
