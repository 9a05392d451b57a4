"""The engine core's process: `python -m workers.engine.core_process --fd N --parent PID`. N is its end of a socket pair; the front,
process PID, holds the other.

Reads an `EngineConfig`, answers with `Ready` or `Failed`, then serves until the front says `Shutdown`, closes its end or dies.
"""

import argparse
import ctypes
import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import threading
import traceback
from queue import SimpleQueue

import msgspec

from workers.engine.config import EngineConfig
from workers.engine.errors import ModelLoadError
from workers.engine.messages import Failed, ToCore
from workers.engine.transport import FrameReader, FrameSender

_PR_SET_PDEATHSIG = 1


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True, help="the front's process id")
    parser.add_argument("--log-level", type=int, default=logging.INFO, help="as the logging module counts them")
    given = parser.parse_args()
    fd = given.fd
    _die_with_parent(given.parent)
    _detach_from_terminal(fd)
    _set_up_log(given.log_level)
    connection = socket.socket(fileno=fd)
    reader = FrameReader(connection)
    config = reader.read(msgspec.msgpack.Decoder(EngineConfig))
    if config is None:
        return 0
    inbox: SimpleQueue[ToCore] = SimpleQueue()
    threading.Thread(target=_receive, args=(reader, inbox), name="receive", daemon=True).start()
    sender = FrameSender(connection)
    try:
        _serve(config, inbox, sender)
    except Exception as error:
        if not _explains_itself(error):
            traceback.print_exc()
        sender.put(Failed(_sentence(error)))
        return 1
    finally:
        sender.close()
    return 0


def _serve(config: EngineConfig, inbox: SimpleQueue[ToCore], sender: FrameSender) -> None:
    # A compute thread that spins at a barrier takes the processor from the thread it waits for as soon as anything else runs beside them:
    # a step then takes ten times as long. OpenMP reads this when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Imported here, when the front is already being listened to, since importing torch takes seconds.
    from workers.engine.core import EngineCore
    from workers.engine.executor import Executor

    core = EngineCore(Executor(config))
    # What loading left behind lives as long as the process; without this each full collection walks through it, at the cost of a step.
    gc.collect()
    gc.freeze()
    sender.put(core.ready)
    core.run(inbox, sender.put)


def _die_with_parent(parent: int) -> None:
    """The kernel kills this process once the thread that started it is gone (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the order above took hold
        os._exit(1)


def _set_up_log(level: int) -> None:
    logging.basicConfig(level=level, format="%(asctime)s core %(levelname)s %(message)s", datefmt="%H:%M:%S")
    for noisy in ("httpx", "httpx2", "httpcore", "httpcore2", "urllib3", "filelock", "huggingface_hub"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, level))


def _detach_from_terminal(fd: int) -> None:
    """Leaves it to the front to hear Ctrl-C and orders to stop, which may reach a whole group of processes, and keeps its stdout clean."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    os.set_inheritable(fd, False)
    os.dup2(2, 1)


def _receive(reader: FrameReader, inbox: SimpleQueue[ToCore]) -> None:
    decoder = msgspec.msgpack.Decoder(ToCore)
    status = 0
    try:
        while (message := reader.read(decoder)) is not None:
            inbox.put(message)
    except msgspec.MsgspecError as error:
        print(f"a frame from the front could not be read: {error}", file=sys.stderr, flush=True)
        status = 1
    # Nobody is left who could say anything or use a result.
    os._exit(status)


def _explains_itself(error: Exception) -> bool:
    return isinstance(error, ModelLoadError | OSError)


def _sentence(error: Exception) -> str:
    """An error as one line."""
    text = " ".join(str(error).split())
    return text if text and _explains_itself(error) else f"{type(error).__name__}: {text}"


if __name__ == "__main__":
    # Without the interpreter's teardown, which a thread that is still inside a read can hold up; everything has been flushed.
    status = main()
    sys.stderr.flush()
    os._exit(status)
