"""The foreground loop of long-running commands: keep the children running until a signal."""

from typing import TYPE_CHECKING

from jobs.process import as_json_line, logs_json
from pipeline.signals import Signals
from pipeline.stderr import write_line
from pipeline.supervisor import Supervisor

if TYPE_CHECKING:
    from pipeline.hosting.host import ModelHost


def run_until_stopped(supervisor: Supervisor, host: "ModelHost | None" = None) -> None:
    """Supervise until SIGINT or SIGTERM: the first stops gracefully, a second at once.

    `host` loads and unloads models meanwhile. Raises `ChildFailed`.
    """
    with Signals() as signals:
        while not signals.stops:
            pause = supervisor.check()
            if host is None:
                signals.wait(pause)
            else:
                signals.wait(min(pause, host.check()), host.news)
        supervisor.stop(insisted=lambda: signals.stops > 1)


def print_line(line: str) -> None:
    """Print a line to stderr, as JSON if logs are; drop it if it cannot be written."""
    write_line(as_json_line("supervisor", line) if logs_json() else line)
