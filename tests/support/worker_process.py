"""Real workers as child processes, on the demo model in float32 (so that the shape of a batch does
not move a greedy answer).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from jobs.process import die_with_parent
from jobs.queue.registry import WorkerRecord
from jobs.queue.request_queue import Queue
from tests.support.processes import command_line
from tests.support.waiting import wait_until

START_SECONDS = 120.0


class WorkerProcess:
    """A worker that was started, and what the queue knows of it."""

    def __init__(self, process: subprocess.Popen[bytes], queue: Queue, log: str) -> None:
        self.process = process
        self.pid = process.pid
        self._queue = queue
        self._log = log

    @property
    def record(self) -> WorkerRecord | None:
        """The newest in the registry: none until the first is written, and for a moment while
        another engine core follows a dead one.
        """
        return max(
            (record for record in self._queue.workers() if record.pid == self.pid),
            key=lambda record: record.started,
            default=None,
        )

    def wait_ready(self, instead_of: WorkerRecord | None = None) -> WorkerRecord:
        """Its record once that says ready.

        After the death of a core, only a record that is not `instead_of` is the next one's.
        """

        def ready() -> WorkerRecord | None:
            record = self.record
            return (
                record
                if record is not None and record.state == "ready" and (instead_of is None or record.id != instead_of.id)
                else None
            )

        record = wait_until(lambda: self.process.poll() is not None or ready(), START_SECONDS, "the worker to be ready")
        assert isinstance(record, WorkerRecord), self.log()
        return record

    @property
    def state(self) -> str | None:
        record = self.record
        return None if record is None else record.state

    @property
    def core_pid(self) -> int:
        """The engine core, its only child that is a Python process; waits for one that is about to
        be started.
        """
        return wait_until(self._find_core, START_SECONDS, "an engine core")

    @property
    def has_core(self) -> bool:
        return self._find_core() is not None

    def _find_core(self) -> int | None:
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return next((int(child) for child in children if "core_process" in command_line(int(child))), None)

    def log(self) -> str:
        return Path(self._log).read_text(errors="replace")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self, timeout: float = 60.0) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)


@contextmanager
def running_worker(
    queue: Queue, redis_url: str, *flags: str, ready: bool = True, **environment: str
) -> Iterator[WorkerProcess]:
    """A worker with these flags of `pipeline worker` and more in its environment; killed at the end
    if it still runs.
    """
    with tempfile.NamedTemporaryFile("wb", suffix=".log") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "pipeline", "worker", "--redis-url", redis_url, "--dtype", "float32", *flags],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PIPELINE_DEVICE": "cpu", **environment},
            stderr=log,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        worker = WorkerProcess(process, queue, log.name)
        try:
            if ready:
                worker.wait_ready()
            yield worker
        except BaseException:
            # Pytest shows it with the failure
            print(f"worker {worker.pid}:", worker.log(), sep="\n")
            raise
        finally:
            if process.poll() is None:
                worker.kill()
