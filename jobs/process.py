"""What processes have in common: they die with their parent, and name themselves in their log."""

import argparse
import ctypes
import logging
import os
import signal
import sys
from typing import TextIO

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)  # loaded before a fork, after which nothing may be


def die_with_parent(parent: int | None = None) -> None:
    """The kernel kills this process once the thread that started it is gone, however it ends;
    nothing of a batch is lost by that (Linux).

    `parent` is the process that must still be there, by default the present one. As
    `preexec_fn=partial(die_with_parent, os.getpid())`, or as the first thing that a process does.
    """
    expected = os.getppid() if parent is None else parent
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != expected:  # it ended before the order above took hold
        os._exit(1)


def add_redis_url(parser: argparse.ArgumentParser) -> None:
    """`--redis-url`, and REDIS_URL in its place, which unlike an argument cannot be read by every
    user of the machine.
    """
    given = os.environ.get("REDIS_URL")
    parser.add_argument(
        "--redis-url", default=given, required=not given, help="where the queue is [environment: REDIS_URL]"
    )


class _CurrentStderr(logging.StreamHandler[TextIO]):
    """Write to the stderr of the moment, which a progress bar replaces while it is shown."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def configure_logs(process: str, level: str = "info") -> None:
    """Send this process' log to stderr, one line per record, as `10:31:02 worker-0 INFO text`.

    At level debug, times have milliseconds.
    """
    time = "%(asctime)s.%(msecs)03d" if level == "debug" else "%(asctime)s"
    handler = _CurrentStderr()
    handler.setFormatter(logging.Formatter(f"{time} {process} %(levelname)s %(message)s", datefmt="%H:%M:%S"))
    logging.root.handlers[:] = [handler]
    logging.root.setLevel(level.upper())
    http = ("httpx", "httpx2", "httpcore", "httpcore2", "urllib3", "huggingface_hub")
    for noisy in (*http, "uvicorn.error", "filelock", "rq.worker", "asyncio"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.root.level))
