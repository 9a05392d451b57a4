"""The `pipeline` command as a person runs it: a process of its own, with its exit code and what it
prints.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.waiting import wait_until

REPOSITORY = Path(__file__).parent.parent.parent
EXAMPLES = REPOSITORY / "examples" / "requests.jsonl"


def run_pipeline(
    *arguments: object,
    redis_url: str | None = None,
    timeout: float = 250,
    folder: Path = REPOSITORY,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Runs the command to its end."""
    return subprocess.run(
        command(*arguments),
        env=command_environment(redis_url, environment),
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=folder,
    )


@contextmanager
def running_pipeline(
    *arguments: object, redis_url: str | None = None, folder: Path = REPOSITORY, **environment: str
) -> Iterator["RunningCommand"]:
    """Starts the command; at the end it is stopped and waited for."""
    started = RunningCommand(command(*arguments), command_environment(redis_url, environment), folder)
    try:
        yield started
    finally:
        started.stop()


class RunningCommand:
    """A command that runs in the background; its output is kept in a file."""

    def __init__(self, arguments: list[str], environment: dict[str, str], folder: Path = REPOSITORY) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - open for as long as someone reads it
        self.process = subprocess.Popen(
            arguments,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            cwd=folder,
        )

    @property
    def output(self) -> str:
        """What it printed so far."""
        file = self._output.fileno()
        # pread does not move the offset at which the command writes
        return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")

    def wait_for(self, text: str, timeout: float = 150) -> str:
        """Waits until `text` was printed; returns everything so far."""
        wait_until(lambda: text in self.output or self.process.poll() is not None, timeout, f"{text!r} in the output")
        assert text in self.output, self.output
        return self.output

    def wait(self, timeout: float = 150) -> int:
        """Waits for its end; returns the exit code."""
        wait_until(lambda: self.process.poll() is not None, timeout, "the command to end")
        assert self.process.returncode is not None
        return self.process.returncode

    def stop(self) -> None:
        """SIGTERM, then the end."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.wait(60)
            finally:
                self.process.kill()
                self.process.wait()
        self._output.close()


def command(*arguments: object) -> list[str]:
    """The command line."""
    return [sys.executable, "-m", "pipeline", *(str(argument) for argument in arguments)]


def command_environment(redis_url: str | None, more: dict[str, str]) -> dict[str, str]:
    """This process' environment with one compute thread, no GPU (several workers could not share
    one) and no other queue than the one given.
    """
    kept = {
        name: value for name, value in os.environ.items() if name != "REDIS_URL" and not name.startswith("PIPELINE_")
    }
    return {
        **kept,
        "OMP_NUM_THREADS": "1",
        "PIPELINE_DEVICE": "cpu",
        **({"REDIS_URL": redis_url} if redis_url else {}),
        **more,
    }
