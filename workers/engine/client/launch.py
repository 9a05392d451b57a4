"""Start a core's process before its client exists.

A core needs seconds to become ready, most of them before it reads a message. This module imports
little.
"""

import logging
import os
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, replace

from workers.engine.messages.config import EngineConfig
from workers.engine.messages.transport import frame
from workers.engine.process import child_environment

logger = logging.getLogger(__name__)

CORE_MODULE = "workers.engine.core_process"
_BINDING = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES", "OMP_PROC_BIND")


@dataclass
class LaunchedCore:
    """A core that loads its model; it ends with the thread that launched it.

    `connection` is the client's end of the socket pair, `config` the configuration sent to the
    core.

    The launching code must finally discard it. Discarding has no effect on a core that is `taken`:
    the engine that took it ends it.
    """

    process: "subprocess.Popen[str]"
    connection: socket.socket
    config: EngineConfig
    taken: bool = False

    def discard(self) -> None:
        """End the core, unless an engine has taken it.

        Returns once it is gone. Further calls have no effect.
        """
        if self.taken:
            return
        self.connection.close()
        self.process.kill()
        self.process.wait()
        if self.process.stderr is not None:
            self.process.stderr.close()


def launch_core(config: EngineConfig) -> LaunchedCore:
    """Start a core's process. Raises OSError."""
    # Resolved before the core starts with its own OMP_NUM_THREADS, which its ranks would otherwise
    # divide again.
    config = replace(config, threads=config.compute_threads())
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    CORE_MODULE,
                    "--fd",
                    str(theirs.fileno()),
                    *_log_and_parent(),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=_environment(config),
                text=True,
                errors="replace",
            )
        # The core has already ended; the engine that waits for it detects that
        with suppress(ConnectionError):
            ours.sendall(frame(config))
    except BaseException:
        ours.close()
        raise
    return LaunchedCore(process, ours, config)


def _log_and_parent() -> list[str]:
    return ["--parent", str(os.getpid()), "--log-level", str(logger.getEffectiveLevel())]


def _environment(config: EngineConfig) -> dict[str, str]:
    """Return the core's environment, with thread counts that torch reads at import.

    OpenMP would bind the thread that starts those of the CPU kernels to one processor, which they
    all would share with it.
    """
    threads, inherited = str(config.threads), child_environment()
    if bound := sorted(name for name in _BINDING if inherited.pop(name, None)):
        logger.warning("%s ignored: choose the processors of a worker by taskset or numactl", ", ".join(bound))
    return {**inherited, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
