"""What the control plane's processes have in common: they die with their parent, and name themselves in their log."""

import ctypes
import logging
import os
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """The kernel kills this process when its parent ends, however it ends; nothing of a batch is lost by that (Linux)."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def set_up_log(name: str) -> None:
    """Lines on stderr with time, level and the process' name."""
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {name} %(levelname)s %(message)s", datefmt="%H:%M:%S")
