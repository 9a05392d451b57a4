"""What processes write: to their log as JSON, those of the queue and those of the engine, and to
stdout, also where they are stopped meanwhile.
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from tests.support.commands import REPOSITORY, command_environment
from tests.support.waiting import wait_until

LOGGED = """
import logging
log = logging.getLogger("some.module")
log.info("two\\nlines of %s", "text", extra={"fields": {"status": 200}})
try:
    1 / 0
except ZeroDivisionError:
    log.exception("it failed")
log.debug("not shown")
"""
OF_JOBS = 'from jobs.process import configure_logs; configure_logs("ticker")'
OF_THE_ENGINE = """
import os, socket
from workers.engine.process import become_child
become_child(os.getppid(), socket.socketpair()[0], "core", 20)
"""


def records_of(program: str, **environment: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-c", program + LOGGED],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env=command_environment(None, {"PIPELINE_LOG_FORMAT": "json", **environment}),
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stderr.splitlines()]


@pytest.mark.parametrize(
    ("program", "name", "name_in_a_worker"),
    [(OF_JOBS, "ticker", "worker-1"), (OF_THE_ENGINE, "core", "worker-1 core")],
    ids=["jobs", "engine"],
)
def test_a_record_is_one_line(program: str, name: str, name_in_a_worker: str) -> None:
    first, second = records_of(f"{program}\n")
    assert (first["process"], first["logger"], first["level"]) == (name, "some.module", "INFO")
    assert first["message"] == "two\nlines of text"
    assert (second["level"], second["message"]) == ("ERROR", "it failed")
    assert "ZeroDivisionError" in second["exception"]
    named, _ = records_of(f"{program}\n", PIPELINE_LOG_NAME="worker-1")
    assert named["process"] == name_in_a_worker


def test_a_crash_says_in_which_function() -> None:
    program = f"{OF_JOBS}\nimport ctypes\ndef crashing() -> None: ctypes.string_at(0)\ncrashing()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == -signal.SIGSEGV
    assert "in crashing" in done.stderr


def test_the_limit_of_open_files_is_raised_as_far_as_the_system_allows() -> None:
    program = """
import resource
from jobs.process import raise_open_files
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 150))
assert raise_open_files() == 150
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (150, 150)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr


def test_fields_of_a_record_are_keys() -> None:
    assert records_of(f"{OF_JOBS}\n")[0]["status"] == 200


@pytest.mark.parametrize(
    ("program", "given", "lines"),
    [
        pytest.param(
            "from pipeline import main; main.cli.main = lambda **_: print('x' * 270_000); main.main()",
            b"",
            ["x" * 270_000],
            id="command line",
        ),
        pytest.param(
            "import sys; from jobs.batch.table_lines import main; sys.argv[1:] = 'in.csv .csv 0 0 0'.split(); main()",
            b"null",
            [
                f'{{"method":"POST","body":{{"prompt":"{"x" * 90_000}"}},"custom_id":"{name}","url":"/v1/completions"}}'
                for name in "ab"
            ],
            id="table",
        ),
    ],
)
def test_a_process_that_is_stopped_as_it_writes_writes_all_of_it(
    tmp_path: Path, program: str, given: bytes, lines: list[str]
) -> None:
    """The system ends its write with what the pipe could take until then."""
    (tmp_path / "in.csv").write_text("custom_id,prompt\n" + "".join(f"{name},{'x' * 90_000}\n" for name in "ab"))
    (tmp_path / "given").write_bytes(given)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(REPOSITORY)}
    with (
        (tmp_path / "given").open("rb") as stdin,
        subprocess.Popen(
            [sys.executable, "-c", program], cwd=tmp_path, env=environment, stdin=stdin, stdout=subprocess.PIPE
        ) as writing,
    ):
        assert writing.stdout is not None
        capacity = fcntl.fcntl(writing.stdout, fcntl.F_GETPIPE_SZ)
        wait_until(lambda: bytes_in(writing.stdout) == capacity, 60, "the pipe to be full")
        writing.send_signal(signal.SIGSTOP)
        wait_until(lambda: psutil.Process(writing.pid).status() == psutil.STATUS_STOPPED, 60, "its stop")
        writing.send_signal(signal.SIGCONT)
        assert writing.stdout.read().decode().splitlines() == lines


def bytes_in(pipe: IO[bytes] | None) -> int:
    assert pipe is not None
    count = bytearray(4)
    fcntl.ioctl(pipe, termios.FIONREAD, count)
    return int.from_bytes(count, sys.byteorder)
