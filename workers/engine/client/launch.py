"""The start of a core's process, apart from whoever talks to it: a core takes seconds to be ready,
and most of them pass before it needs to hear anything. Imports little.
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


@dataclass
class LaunchedCore:
    """A core that loads its model; it ends with the thread that launched it.

    `connection` is the front's end, `config` what it was sent.

    Whoever launched it discards it in the end, which does nothing to one that is `taken`: the
    engine that took it ends it.
    """

    process: "subprocess.Popen[str]"
    connection: socket.socket
    config: EngineConfig
    taken: bool = False

    def discard(self) -> None:
        """Ends it, unless somebody has taken it.

        Returns once it is gone; repeating it changes nothing.
        """
        if self.taken:
            return
        self.connection.close()
        self.process.kill()
        self.process.wait()
        if self.process.stderr is not None:
            self.process.stderr.close()


def launch_core(config: EngineConfig) -> LaunchedCore:
    """Starts a core's process. Raises OSError."""
    # Settled before the core is started with an OMP_NUM_THREADS of its own, of which its ranks
    # would else take shares again.
    config = replace(config, threads=config.compute_threads())
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "workers.engine.core_process",
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
        # It has ended already, which whoever waits for it will find
        with suppress(ConnectionError):
            ours.sendall(frame(config))
    except BaseException:
        ours.close()
        raise
    return LaunchedCore(process, ours, config)


def _log_and_parent() -> list[str]:
    return ["--parent", str(os.getpid()), "--log-level", str(logging.getLogger(__name__).getEffectiveLevel())]


def _environment(config: EngineConfig) -> dict[str, str]:
    """The core's environment, with thread counts that count only before torch is imported."""
    threads = str(config.threads)
    return {**child_environment(), "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
