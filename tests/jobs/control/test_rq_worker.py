"""The processes that run the jobs: quick, quiet when idle, clean on SIGTERM, gone with their
parent, and not stopped by an outage.
"""

import logging
import resource
import signal
import socket
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
import redis
from rq import Callback
from rq import Queue as JobQueue
from rq.executions import Execution
from rq.job import Job
from rq.serializers import JSONSerializer
from rq.webhook import Webhook

from jobs.batch.client import BatchSpec, create_batch, get_batch
from jobs.batch.manifest import load_manifest
from jobs.control.driver import Driver
from jobs.control.health import control_plane_fault
from jobs.control.rq_worker import ControlJob, ControlWorker
from jobs.process import STOP_SIGNALS, ignore_stop_signals
from jobs.queue import keys
from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue
from jobs.queue.tasks import FUNCTION, hand_out, take_batches
from tests.support.batch_steps import answer_all, wait_for_batch
from tests.support.control_plane import ROOT, Answering, ControlPlane, check_echoes, control_plane, write_input
from tests.support.processes import catches, is_running, wait_for_rest
from tests.support.redis_server import keep_all_that_is_said, kill_and_start, running_server
from tests.support.slow_file import slow_reading
from tests.support.waiting import wait_until


def spec_of(source: Path) -> BatchSpec:
    root, output = source.with_name("out.parts"), source.with_name("out.jsonl")
    return BatchSpec(input=str(source), root=str(root), output=str(output), error_file="inline", models=("m",))


def test_a_small_batch_runs_through_without_waiting(redis_client: redis.Redis, redis_url: str, tmp_path: Path) -> None:
    """A run that waits for a tick, or for RQ's poll, waits each time, so one of many that did not
    is enough.
    """
    seconds: list[float] = []
    with control_plane(redis_url) as plane, Answering(redis_url):
        for turn in range(30):
            source = write_input(tmp_path / str(turn) / "in.jsonl", 300)
            started = time.monotonic()
            record = wait_for_batch(redis_client, create_batch(redis_client, spec_of(source)).id, timeout=60)
            seconds.append(time.monotonic() - started)
            assert (record.state, record.completed) == ("completed", 300)
            check_echoes(source.with_name("out.jsonl"), 300)
            if min(seconds) < 0.9:
                break
        plane.stop()
    print("300 lines in", seconds)  # about 0.15 s when the machine is free
    assert min(seconds) < 0.9


def test_idle_processes_rest(redis_client: redis.Redis, redis_url: str) -> None:
    with control_plane(redis_url) as plane:
        wait_until(
            lambda: redis_client.exists("{q}:leader") and len(redis_client.smembers("rq:workers")) == 2,
            60,
            "processes are up",
        )
        wait_for_rest([process.pid for process in plane.processes.values()], 0.015)


def test_nothing_in_redis_is_pickled(redis_client: redis.Redis) -> None:
    hand_out(Queue(redis_client), "batch_x")
    (name,) = redis_client.lrange("rq:queue:batches", 0, -1)
    data = zlib.decompress(redis_client.hget(b"rq:job:" + name, "data"))  # type: ignore[arg-type]
    assert JSONSerializer.loads(data) == ["jobs.drive.run", None, [], {}]


def test_batches_that_wait_share_one_job(redis_client: redis.Redis) -> None:
    queue = Queue(redis_client)
    for number in range(20):
        hand_out(queue, f"batch_{number:02}")
        hand_out(queue, "batch_00")
    assert redis_client.llen("rq:queue:batches") == 1
    redis_client.delete("rq:queue:batches")
    assert take_batches(queue, 16) == [f"batch_{number:02}" for number in range(16)]
    assert redis_client.llen("rq:queue:batches") == 1, "for the rest"
    redis_client.delete("rq:queue:batches")
    assert take_batches(queue, 16) == [f"batch_{number:02}" for number in range(16, 20)]
    assert redis_client.llen("rq:queue:batches") == 0


def test_a_job_that_redis_forgot_ends_without_a_trace(
    redis_client: redis.Redis, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Driver, "take_batches", lambda driver: driver.queue.redis.flushall())
    run_one_job(redis_client, FUNCTION, job_id="forgotten", result_ttl=0)
    assert warnings_in(caplog) == []
    assert [key for key in redis_client.scan_iter() if b"forgotten" in key] == []


def test_an_outage_around_a_job_is_one_line(
    redis_client: redis.Redis, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise redis.ConnectionError("gone")

    monkeypatch.setattr(ControlWorker, "prepare_job_execution", fail)
    run_one_job(redis_client, FUNCTION, job_id="unlucky", result_ttl=0)
    assert warnings_in(caplog) == ["Redis unavailable; batches wait until it answers: Redis is out of reach: gone"]
    assert "Traceback" not in caplog.text


@pytest.mark.proof
@pytest.mark.parametrize(("process", "kind"), [("rq_worker", "OOM"), ("rq_worker", "NOAUTH"), ("ticker", "NOAUTH")])
def test_an_outage_that_lasts_takes_two_lines(
    redis_client: redis.Redis, redis_url: str, tmp_path: Path, process: str, kind: str
) -> None:
    def refusals() -> int:
        errors: Any = redis_client.info("errorstats")
        return int(errors.get(f"errorstat_{kind}", {"count": 0})["count"])

    log = tmp_path / "log"
    options = {"maxmemory": ("1", "0")} if kind == "OOM" else {"requirepass": ("secret", "")}
    [(option, (refuse, accept))] = options.items()
    command = [sys.executable, "-m", f"jobs.control.{process}", "--redis-url", redis_url]
    with log.open("wb") as file, subprocess.Popen(command, stderr=file, cwd=ROOT) as running:
        try:
            name = keys.LEADER if process == "ticker" else "rq:workers"
            wait_until(lambda: redis_client.exists(name), 60, "the process to work")
            before = refusals()
            redis_client.config_set(option, refuse)
            redis_client.client_kill_filter(_type="normal", skipme=True)
            wait_until(lambda: refusals() > before + 10, 60, "many refusals")
            redis_client.config_set(option, accept)
            wait_until(lambda: "Redis available again" in log.read_text(), 60, "the end of the outage")
        finally:
            redis_client.config_set(option, accept)
            running.terminate()
    lines = log.read_text().splitlines()
    assert [line.partition(" Redis ")[2].partition(";")[0] for line in lines if "available" in line] == [
        "unavailable",
        "available again",
    ], lines
    assert "Traceback" not in log.read_text()


def test_a_job_whose_run_redis_lost_ends_without_a_trace(
    redis_client: redis.Redis, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RQ lists the runs of a job, and then reads each."""
    executions = Job.get_executions

    def lose_and_get(job: Job) -> list[Execution]:
        for key in redis_client.scan_iter("rq:execution:*"):
            redis_client.delete(key)
        return executions(job)

    monkeypatch.setattr(Job, "get_executions", lose_and_get)
    run_one_job(redis_client, FUNCTION, job_id="forgotten", result_ttl=0)
    assert warnings_in(caplog) == []
    assert [key for key in redis_client.scan_iter() if b"forgotten" in key] == []


@pytest.mark.parametrize(
    ("function", "arguments", "warning"),
    [
        ("tripwire.run", (), "dropped job other: this version has no job tripwire.run"),
        (FUNCTION, (), None),
        (FUNCTION, ("batch_x",), "takes 1 positional argument but 2 were given"),
    ],
    ids=["of another name", "succeeds", "fails"],
)
def test_nothing_that_a_job_names_is_imported_or_fetched(
    redis_client: redis.Redis,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    arguments: tuple[object, ...],
    warning: str | None,
) -> None:
    (tmp_path / "tripwire.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    trap = Callback("tripwire.run")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        hooks = [Webhook(url, status, timeout=1) for status in ("finished", "failed")]
        options = {"on_success": trap, "on_failure": trap, "on_stopped": trap, "webhooks": hooks}
        run_one_job(redis_client, function, args=arguments, job_id="other", result_ttl=500, **options)
        with pytest.raises(BlockingIOError):
            server.accept()
    job = ControlJob.fetch("other", connection=redis_client, serializer=JSONSerializer)
    assert job.is_finished is (warning is None or function == "tripwire.run")
    assert (job.success_callback, job.failure_callback, job.stopped_callback) == (None, None, None)
    assert [warning in message for message in warnings_in(caplog)] == ([True] if warning else [])
    assert redis_client.llen("rq:queue:batches") == 0


def run_one_job(client: redis.Redis, function: str, **options: Any) -> None:
    """Enqueue the job and run it as the process does."""
    JobQueue("batches", connection=client, serializer=JSONSerializer).enqueue_call(function, timeout=-1, **options)
    worker = ControlWorker(client, Driver(Queue(client)))
    dequeued = worker.dequeue_job_and_maintain_ttl(1)
    assert dequeued is not None
    worker.execute_job(*dequeued)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_sigterm_keeps_what_finished(redis_client: redis.Redis, redis_url: str, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.jsonl", 100)
    with control_plane(redis_url) as plane:
        batch = create_batch(redis_client, spec_of(source)).id
        wait_until(lambda: get_batch(redis_client, batch).waiting == 100, 60, "lines are ready")
        plane.kill("ticker")
        answer_all(redis_client, most=60)
        plane.stop()
    manifest = load_manifest(str(tmp_path / "out.parts"))
    assert manifest is not None
    assert sum(part.lines for part in manifest.parts) == 60
    assert Queue(redis_client).results(batch) == []


def test_sigterm_ends_a_long_job_at_its_next_beat(redis_client: redis.Redis, redis_url: str, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.jsonl", 100_000)
    plane = ControlPlane(redis_url, environment=slow_reading(source, 0.001))
    plane.start("driver")
    batch = create_batch(redis_client, spec_of(source)).id
    wait_until(lambda: Queue(redis_client).batch_fields(batch).driver, 60, "a process drives it")
    plane.stop()
    assert get_batch(redis_client, batch).state == "validating"
    assert not [path for path in (tmp_path / "out.parts").iterdir() if path.suffix == ".bin"]


@pytest.mark.parametrize("name", ["driver", "ticker"])
def test_sigterm_is_handled_from_the_start(redis_url: str, name: str) -> None:
    plane = ControlPlane(redis_url)
    plane.start(name)
    plane.stop()


STOP_AS_A_THREAD_STARTS = """
import os, runpy, signal, sys, threading

start = threading._start_new_thread


def start_and_stop(*arguments):
    start(*arguments)
    if callable(signal.getsignal(signal.SIGTERM)):
        os.kill(os.getpid(), signal.SIGTERM)


threading._start_new_thread = start_and_stop
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("name", ["driver", "ticker"])
def test_sigterm_while_a_thread_starts_ends_the_process_in_order(redis_url: str, name: str) -> None:
    """`Thread.start` leaves a process broken if a handler raises in it."""
    plane = ControlPlane(redis_url)
    plane.start(name, launcher=("-c", STOP_AS_A_THREAD_STARTS))
    plane.stop()


STOP_IN_A_LINE = """
import logging, os, runpy, signal, sys

format_line = logging.Handler.format


def format_and_stop(handler, record):
    if callable(signal.getsignal(signal.SIGTERM)):
        os.kill(os.getpid(), signal.SIGTERM)
    return format_line(handler, record)


logging.Handler.format = format_and_stop
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""

STOP_IN_A_DESTRUCTOR = """
import os, runpy, signal, sys, threading, time

sleep = time.sleep


class StoppingAtItsEnd:
    def __del__(self):
        if threading.current_thread() is threading.main_thread():
            os.kill(os.getpid(), signal.SIGTERM)


def sleep_and_stop(seconds):
    StoppingAtItsEnd()
    sleep(seconds)


time.sleep = sleep_and_stop
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("name", "script"),
    [
        pytest.param("driver", STOP_IN_A_LINE, id="line"),
        pytest.param("driver", STOP_IN_A_DESTRUCTOR, id="destructor"),
        pytest.param("ticker", STOP_IN_A_DESTRUCTOR, id="destructor of the ticker"),
    ],
)
def test_sigterm_at_an_unlucky_moment_of_an_outage_writes_no_traceback(
    name: str, script: str, capfd: pytest.CaptureFixture[str]
) -> None:
    plane = ControlPlane("unix:///nowhere/redis.sock")
    plane.start(name, launcher=("-c", script))
    assert plane.processes[name].wait(60) == 0
    assert "Traceback" not in capfd.readouterr().err


def test_a_stop_whose_exception_was_lost_ends_the_loop(
    redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal may come while a destructor runs, which drops what its handler raises.

    The next signal must not interrupt the end of the process.
    """
    driver = Driver(Queue(redis_client))
    register = ControlWorker.register_birth

    def register_and_stop(worker: ControlWorker) -> None:
        register(worker)
        ignore_stop_signals()
        driver.stopping.set()

    monkeypatch.setattr(ControlWorker, "register_birth", register_and_stop)
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        assert not ControlWorker(redis_client, driver).work(logging_level="WARNING")
        assert {signal.getsignal(number) for number in STOP_SIGNALS} == {signal.SIG_IGN}
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("name", ["driver", "ticker"])
def test_children_die_with_their_parent(redis_client: redis.Redis, redis_url: str, name: str) -> None:
    command = ControlPlane(redis_url)._commands[name]
    start = f"subprocess.Popen([sys.executable, '-m', *{command!r}])"
    script = f"import subprocess, sys, time\nprint({start}.pid, flush=True)\ntime.sleep(600)"
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    ready = (
        (lambda: redis_client.exists("{q}:leader"))
        if name == "ticker"
        else (lambda: redis_client.smembers("rq:workers"))
    )
    wait_until(ready, 60, "the child is up")
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_until(lambda: not is_running(child), 60, "the child is gone")


@pytest.mark.parametrize("name", ["driver", "ticker"])
def test_as_many_files_may_be_open_as_the_system_allows(redis_url: str, name: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    plane = ControlPlane(redis_url)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard - 1, hard))
    try:
        plane.start(name)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    pid = plane.processes[name].pid
    wait_until(lambda: catches(pid, signal.SIGTERM), 60, "the process is up")
    assert resource.prlimit(pid, resource.RLIMIT_NOFILE) == (hard, hard)
    plane.stop()


def test_an_outage_of_redis_stops_no_process(tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.jsonl", 2000)
    with running_server() as server, control_plane(server.url) as plane, Answering(server.url, limit=16, pause=0.005):
        client = connect(server.url)
        keep_all_that_is_said(server)  # a batch of which Redis lost the record would not come back
        batch = create_batch(client, spec_of(source)).id
        for fraction in (0.1, 0.5):
            wait_until(
                lambda least=2000 * fraction: get_batch(client, batch).completed > least, 60, "some lines are done"
            )  # type: ignore[misc]
            kill_and_start(server)
        record = wait_for_batch(client, batch, timeout=150)
        assert {name: process.poll() for name, process in plane.processes.items()} == dict.fromkeys(plane.processes)
        client.close()
    assert (record.state, record.completed) == ("completed", 2000)
    check_echoes(tmp_path / "out.jsonl", 2000)


@pytest.mark.proof
def test_small_batches_do_not_wait_for_slices_of_each_busy_one(
    redis_client: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    """Four of them, one after the other, end before half of the busy batches' lines have."""
    large, count, lines = write_input(tmp_path / "large.jsonl", 20_000), 8, 20_000

    def spec(source: Path, name: str, tenant: str) -> BatchSpec:
        folder = tmp_path / name
        return BatchSpec(
            input=str(source), root=f"{folder}.parts", output=f"{folder}.jsonl", models=("m",), tenant=tenant
        )

    with control_plane(redis_url), Answering(redis_url, limit=500):
        busy = [create_batch(redis_client, spec(large, f"large{number}", "first")).id for number in range(count)]
        wait_until(lambda: min(get_batch(redis_client, batch).completed for batch in busy) > 100, 120, "all run")
        before = sum(get_batch(redis_client, batch).completed for batch in busy)
        for number in range(4):
            source = write_input(tmp_path / f"in{number}.jsonl", 10)
            small = create_batch(redis_client, spec(source, f"small{number}", ("first", "second")[number % 2])).id
            assert wait_for_batch(redis_client, small, timeout=120).completed == 10
        meanwhile = sum(get_batch(redis_client, batch).completed for batch in busy) - before
    print(f"{before} lines of the busy batches had ended, {meanwhile} did meanwhile")
    assert meanwhile < count * lines / 2 - 1000


def test_another_application_of_rq_keeps_its_jobs_where_ours_have_their_own_database(
    redis_client: redis.Redis, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RQ_DB", "3")
    other = JobQueue("batches", connection=redis_client, serializer=JSONSerializer)
    theirs = other.enqueue_call("their.function", job_id="theirs")
    with control_plane(redis_url), Answering(redis_url), connect(redis_url, db=3) as ours:
        batch = create_batch(redis_client, spec_of(write_input(tmp_path / "in.jsonl", 5))).id
        assert wait_for_batch(redis_client, batch, timeout=60).completed == 5
        wait_until(
            lambda: control_plane_fault(Queue(redis_client), socket.gethostname()) is None,
            60,
            "a healthy control plane",
        )
        assert other.get_job_ids() == [theirs.id]
        assert {key for key in redis_client.scan_iter("rq:*") if batch.encode() in key or b"worker" in key} == set()
        assert {key.partition(b":")[0] for key in ours.scan_iter()} == {b"rq"}
        ours.flushdb()


@pytest.mark.parametrize(("last", "code"), [("driver.stopping.set()", 0), ("raise KeyError", 1)])
def test_a_process_ends_though_a_disk_holds_a_thread_of_a_pool(redis_url: str, last: str, code: int) -> None:
    program = f"""
import sys, time
from concurrent.futures import ThreadPoolExecutor
from jobs.control import rq_worker

def serve(url, driver):
    ThreadPoolExecutor(1).submit(time.sleep, 600)
    {last}

rq_worker._serve = serve
rq_worker.main()
"""
    command = [sys.executable, "-c", program, "--redis-url", redis_url]
    assert subprocess.run(command, cwd=ROOT, timeout=60).returncode == code


def test_a_small_batch_does_not_wait_while_a_large_one_is_read(
    redis_client: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    large = write_input(tmp_path / "large" / "in.jsonl", 200_000)
    small = write_input(tmp_path / "small" / "in.jsonl", 5)
    with control_plane(redis_url, environment=slow_reading(large, 0.0005)) as plane, Answering(redis_url):
        first = create_batch(redis_client, spec_of(large)).id
        wait_until(lambda: Queue(redis_client).batch_fields(first).driver, 60, "a process drives it")
        assert wait_for_batch(redis_client, create_batch(redis_client, spec_of(small)).id, timeout=60).completed == 5
        assert get_batch(redis_client, first).state == "validating"
        plane.stop()
