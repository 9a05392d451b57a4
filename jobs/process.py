"""Shared setup of processes: death with the parent, resource limits, and logs with a name."""

import argparse
import contextlib
import faulthandler
import io
import json
import logging
import os
import resource
import signal
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

from jobs.host import tie_to_parent

FORMAT_VARIABLE = "PIPELINE_LOG_FORMAT"
"""The format of log lines, text or json, in this process and its children."""

NAME_VARIABLE = "PIPELINE_LOG_NAME"
"""The name of one of several equal processes in JSON lines."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def die_with_parent(parent: int | None = None) -> None:
    """Tie this process to its parent: it is killed once the parent is gone, however that ends.

    Batches lose nothing by that. `parent` is the process that must still exist, by default
    the current one. Use `preexec_fn=partial(die_with_parent, os.getpid())`, or call it first in a
    process.
    """
    expected = os.getppid() if parent is None else parent
    tie_to_parent(expected)
    if os.getppid() != expected:  # it ended before it was tied
        os._exit(1)


def ignore_stop_signals() -> None:
    """Ignore further orders to stop; their exceptions would interrupt the cleanup at a process'
    end.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def limit_resource(what: int, most: int) -> None:
    """Limit this process' use of a resource, such as RLIMIT_DATA; a lower limit stays."""
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def buffer_stdout() -> None:
    """Make writes to stdout complete.

    With PYTHONUNBUFFERED, a write that a signal interrupts (such as a stop and continue of the
    process) may be partial, and the rest is lost. Lines of text still appear at once; bytes wait
    for a flush.
    """
    if isinstance(getattr(sys.stdout, "buffer", None), io.RawIOBase):
        sys.stdout = open(  # noqa: SIM115 - for as long as the process runs
            sys.stdout.fileno(),
            "w",
            buffering=1,
            encoding=sys.stdout.encoding,
            errors=sys.stdout.errors,
            closefd=False,
        )


def raise_open_files() -> int:
    """Raise the limit of open files to the maximum allowed, and return it; -1 means unlimited."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # the hard limit may be above the kernel's
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return hard
    return soft


def add_redis_url(parser: argparse.ArgumentParser) -> None:
    """Add the option `--redis-url`, with REDIS_URL as its default.

    Unlike an argument, the variable is not readable by every user of the machine.
    """
    given = os.environ.get("REDIS_URL")
    parser.add_argument(
        "--redis-url", default=given, required=not given, help="where the queue is [environment: REDIS_URL]"
    )


class _CurrentStderr(logging.StreamHandler[TextIO]):
    """Write to the current stderr, which a progress bar replaces while it is shown."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


class _JsonLines(logging.Formatter):
    """One JSON object per record; `extra={"fields": …}` of a record are keys of their own."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def drop_lost_exits(*others: type[BaseException]) -> None:
    """Suppress reports of `SystemExit` and `others` that a signal's handler raised in a
    destructor.
    """
    report = sys.unraisablehook

    def report_others(lost: "sys.UnraisableHookArgs") -> None:
        if not isinstance(lost.exc_value, (SystemExit, *others)):
            report(lost)

    sys.unraisablehook = report_others


def configure_logs(process: str, level: str = "info") -> None:
    """Send this process' log to stderr, one line per record.

    A line is `10:31:02 worker-0 INFO text`, or JSON. At level debug, times have milliseconds. After
    a crash of native code, it shows the functions of all threads.
    """
    if not faulthandler.is_enabled():
        faulthandler.enable(2)  # not `sys.stderr`, which may have no file
    time = "%(asctime)s.%(msecs)03d" if level == "debug" else "%(asctime)s"
    text = logging.Formatter(f"{time} {process} %(levelname)s %(message)s", datefmt="%H:%M:%S")
    logging.raiseExceptions = False  # a signal's handler may raise while a line is written
    handler = _CurrentStderr()
    handler.setFormatter(_JsonLines(os.environ.get(NAME_VARIABLE, process)) if logs_json() else text)
    logging.root.handlers[:] = [handler]
    logging.root.setLevel(level.upper())
    http = ("httpx", "httpx2", "httpcore", "httpcore2", "urllib3", "huggingface_hub")
    for noisy in (*http, "uvicorn.error", "filelock", "rq.worker", "asyncio"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.root.level))


def logs_json() -> bool:
    """Return whether log lines are JSON, in this process and its children."""
    return os.environ.get(FORMAT_VARIABLE) == "json"


def as_json_line(process: str, line: str) -> str:
    """Return a printed line as JSON; a line that is an object already is not changed."""
    if line.startswith("{"):
        return line
    return _JsonLines(process).format(logging.makeLogRecord({"name": process, "levelname": "INFO", "msg": line}))
