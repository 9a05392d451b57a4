"""What the engine's child processes have in common: they end with their parent, leave the terminal
to it, and say in one line why they cannot go on.
"""

import ctypes
import faulthandler
import gc
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from workers.engine.messages.errors import DETAILS_HINT, ModelLoadError, RankError

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_SPINS = "10000"  # a tenth of a millisecond or two
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_IN_HEAP = 32 << 20  # the most that glibc allows
_KEPT = 256 << 20
_LOOK_SECONDS = 1.0  # for a parent


def become_child(parent: int, connection: socket.socket, name: str, log_level: int) -> None:
    """Set up a child process; called first.

    It ends when `parent` does, ignores SIGINT and SIGTERM, which may reach a whole process group,
    keeps stdout clean, and logs under `name`.
    """
    _die_with_parent(parent)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    connection.set_inheritable(False)
    os.dup2(2, 1)
    logging.basicConfig(level=log_level, format=f"%(asctime)s {name} %(levelname)s %(message)s", datefmt="%H:%M:%S")
    if os.environ.get("PIPELINE_LOG_FORMAT") == "json":
        logging.root.handlers[0].setFormatter(_JsonRecords(name))
    for noisy in ("httpx", "httpx2", "httpcore", "httpcore2", "urllib3", "filelock", "huggingface_hub"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, log_level))


def child_environment() -> dict[str, str]:
    """This process' environment, with the packages that it runs from."""
    packages = str(Path(__file__).resolve().parents[2])
    inherited = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([packages, inherited]) if inherited else packages}


def bound_spinning() -> None:
    """To be called before torch is imported: has one of torch's threads that waits for another spin
    for a moment before it sleeps.

    If it sleeps at once, a step of few rows on plain torch takes a third longer, for there are some
    eighty waits in it. If it spins for as long as OpenMP would, milliseconds, it takes the
    processor from the thread it waits for, or from one of the CPU kernels', and a step takes ten
    times as long. OMP_WAIT_POLICY and GOMP_SPINCOUNT have the last word.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)


def settle_heap() -> None:
    """To be called when the weights are there.

    What loading left behind lives as long as the process: without `gc.freeze` each full collection
    walks through it, at the cost of a step. What reading the weights freed goes back to the system,
    tens of megabytes. What steps free from now on stays: a page that is given back and asked for
    again costs more than what is written to it (glibc alone does either).
    """
    gc.collect()
    gc.freeze()
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.malloc_trim(0)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_IN_HEAP)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT)


def leave(status: int) -> None:
    """End the process without the interpreter's teardown, which a thread that is still inside a
    read can hold up.
    """
    sys.stderr.flush()
    os._exit(status)


def explains_itself(error: Exception) -> bool:
    """Return whether its message is all that a person needs."""
    return isinstance(error, ModelLoadError | RankError | OSError)


def sentence(error: Exception) -> str:
    """Return an error as one line."""
    text, name = " ".join(str(error).split()), type(error).__name__
    return text if text and explains_itself(error) else f"{name}: {text}" if text else name


@contextmanager
def loading(model: str) -> Iterator[None]:
    """Convert each error of a model's loading to one that explains itself; its traceback is logged
    at the level debug.
    """
    try:
        yield
    except Exception as error:
        if explains_itself(error):
            raise
        logger.debug("the model %s cannot be loaded", model, exc_info=True)
        reason = f"the model {model} cannot be loaded: {sentence(error).rstrip('.')}"
        raise ModelLoadError(f"{reason}{DETAILS_HINT}") from error


class _JsonRecords(logging.Formatter):
    """One JSON object per record, as the worker process writes it."""

    def __init__(self, process: str) -> None:
        super().__init__()
        above = os.environ.get("PIPELINE_LOG_NAME")
        self._process = process if above is None else f"{above} {process}"

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _die_with_parent(parent: int) -> None:
    """Have this process killed once its parent is gone: by Linux once the thread that started it
    is gone, elsewhere, or with PIPELINE_PORTABLE set, by a thread that looks for the parent.
    """
    if sys.platform == "linux" and not os.environ.get("PIPELINE_PORTABLE"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_end_after_parent, args=(parent,), name="parent", daemon=True).start()
    if os.getppid() != parent:  # it ended before it was tied
        os._exit(1)


def _end_after_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
