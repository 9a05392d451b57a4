"""The foreground loop of long-running commands: keep the children running until a signal."""

import sys

from jobs.process import as_json_line, logs_json
from pipeline.signals import Signals
from pipeline.supervisor import Supervisor


def run_until_stopped(supervisor: Supervisor) -> None:
    """Supervise until SIGINT or SIGTERM; the first one stops in order, a second one at once.

    Raises `ChildFailed`.
    """
    with Signals() as signals:
        while not signals.stops:
            signals.wait(supervisor.check())
        supervisor.stop(insisted=lambda: signals.stops > 1)


def print_line(line: str) -> None:
    """Print a whole line to stderr in one call, since several threads print; JSON if logs are."""
    sys.stderr.write((as_json_line("supervisor", line) if logs_json() else line) + "\n")
    sys.stderr.flush()
