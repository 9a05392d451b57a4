"""What the control plane's processes have in common: they die with their parent, and name
themselves in their log.
"""

import argparse
import ctypes
import logging
import os
import signal

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


def set_up_log(name: str) -> None:
    """Lines on stderr with time, level and the process' name."""
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {name} %(levelname)s %(message)s", datefmt="%H:%M:%S")
