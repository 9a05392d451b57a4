"""What long-running commands do in the foreground: keep their children running until they are told
to stop.
"""

import sys

from pipeline.signals import Signals
from pipeline.supervisor import Supervisor


def run_until_stopped(supervisor: Supervisor) -> None:
    """Supervises until SIGINT or SIGTERM; the first one stops in order, a second one at once.

    Raises `ChildFailed`.
    """
    with Signals() as signals:
        while not signals.stops:
            signals.wait(supervisor.check())
        supervisor.stop(insisted=lambda: signals.stops > 1)


def print_line(line: str) -> None:
    """To stderr, whole lines at a time, since several threads print."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
