"""The other ranks of a replica: rank 0 in the engine core starts, drives and watches them.

All ranks run the same steps and sample the same tokens, so they return nothing. When a rank ends,
the core ends in the same way, so that the worker process sees the real cause. The kernel ends every
rank with the core.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import msgspec
import torch

from workers.engine.layers.parallel import Parallel, connected_store, listening_store
from workers.engine.messages.ranks import MaskFrame, PlanFrame, RankFailed, RankSetup
from workers.engine.messages.resolved_config import ResolvedConfig
from workers.engine.messages.step import MakeMasks, StepPlan, TokenMasks
from workers.engine.messages.transport import FrameReader, frame
from workers.engine.process import child_environment

logger = logging.getLogger(__name__)

_DECODER = msgspec.msgpack.Decoder(RankFailed)

# From a closed connection to the ended process, which may have to release a device
_END_SECONDS = 5.0
_ECHO_SECONDS = 0.3  # from a rank's death to the other ranks' errors because of it
_VERDICT_SECONDS = 2.0  # from a rank's death to the end of this process
_CRASHES = frozenset((signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE))


@dataclass(frozen=True, slots=True)
class RankDeath:
    """A rank's end. `returncode` is negative for a signal; `said` is its own reason, or ""."""

    rank: int
    pid: int
    returncode: int
    said: str

    @property
    def doubt(self) -> int:
        """Return the likelihood that another rank's death caused this one, by an error or an abort
        in a sum over the ranks.
        """
        if self.returncode < 0:
            return 1 if -self.returncode in _CRASHES else 0
        return 2

    @property
    def sentence(self) -> str:
        if self.said:
            return f"rank {self.rank}: {self.said}"
        how = (
            f"was ended by {signal.Signals(-self.returncode).name}"
            if self.returncode < 0
            else f"ended with status {self.returncode}"
        )
        return f"rank {self.rank} (process {self.pid}) {how}"


OnDeath = Callable[[RankDeath], None]


def end_likewise(death: RankDeath) -> None:
    """End this process as the rank ended: by the same signal, or with status 1."""
    print(death.sentence, file=sys.stderr, flush=True)
    if death.returncode < 0:
        faulthandler.disable()
        os.kill(os.getpid(), -death.returncode)
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)  # this process ignored the first signal
    os._exit(1)


class Ranks:
    """The processes of ranks 1, 2, ... on `devices`; there are none if the replica has one rank.

    Each process inherits the lock of its GPU from `locks`.
    """

    def __init__(self, devices: Sequence[str], locks: Sequence[int], on_death: OnDeath) -> None:
        """Start the processes; the kernel ends them with the calling thread."""
        self._on_death = on_death
        self._closing = self._joined = False
        self._devices = devices
        self._connections: list[socket.socket] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._watchers: list[threading.Thread] = []
        self._deaths: list[RankDeath] = []
        self._noting = threading.Lock()
        for rank in range(1, len(devices) + 1):
            self._start(rank, [locks[rank - 1]] if locks else [])

    def join(self, config: ResolvedConfig, device: torch.device) -> Parallel:
        """Send `config` to all ranks and join them, as rank 0 on `device`.

        Returns when all ranks are connected.
        """
        size = len(self._devices) + 1
        if size == 1:
            return Parallel()
        store, port = listening_store(size)
        with self.heard_first():
            for rank, (connection, place) in enumerate(zip(self._connections, self._devices, strict=True), 1):
                connection.sendall(frame(RankSetup(replace(config, device=place), rank, port)))
            parallel = Parallel.join(0, size, device, store)
        self._joined = True
        return parallel

    def send(self, plan: StepPlan) -> None:
        """Make the other ranks run a step, which this rank must run too."""
        if self._connections:
            self._send(PlanFrame.of(plan))

    def shared(self, masks: MakeMasks | None) -> MakeMasks | None:
        """Return a function that makes the masks and sends them to the other ranks, too."""
        if masks is None or not self._connections:
            return masks

        def make_and_send() -> TokenMasks:
            made = masks()
            self._send(MaskFrame.of(made))
            return made

        return make_and_send

    def _send(self, message: PlanFrame | MaskFrame) -> None:
        encoded = frame(message)
        for connection in self._connections:
            connection.sendall(encoded)

    @contextmanager
    def heard_first(self) -> Iterator[None]:
        """Delay an error raised in the context until the death of a rank would have been handled.

        The error may only be a consequence of that death.
        """
        try:
            yield
        except Exception:
            until = time.monotonic() + (_VERDICT_SECONDS if self._watchers else 0.0)
            for watcher in self._watchers:
                watcher.join(max(0.0, until - time.monotonic()))
            raise

    def close(self) -> None:
        """Wait until the ranks have finished their steps and ended; kill them if not joined."""
        self._closing = True
        for connection in self._connections:
            with suppress(OSError):  # the rank has closed it already
                connection.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + _END_SECONDS
        for process in self._processes:
            _wait(process, deadline if self._joined else 0.0)
        for connection, watcher in zip(self._connections, self._watchers, strict=True):
            watcher.join()
            connection.close()

    def _start(self, rank: int, locks: list[int]) -> None:
        ours, theirs = socket.socketpair()
        level = logger.getEffectiveLevel()
        with theirs:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "workers.engine.device.rank_process"),
                    *(
                        "--fd",
                        str(theirs.fileno()),
                        "--parent",
                        str(os.getpid()),
                        "--rank",
                        str(rank),
                        "--log-level",
                        str(level),
                    ),
                ],
                pass_fds=[theirs.fileno(), *locks],
                stdin=subprocess.DEVNULL,
                env=child_environment(),
            )
        watcher = threading.Thread(
            target=self._watch, args=(rank, process, ours), name=f"watch-rank-{rank}", daemon=True
        )
        self._connections.append(ours)
        self._processes.append(process)
        self._watchers.append(watcher)
        watcher.start()

    def _watch(self, rank: int, process: subprocess.Popen[bytes], connection: socket.socket) -> None:
        message = None
        with suppress(OSError):  # the rank ended with unread data
            message = FrameReader(connection).read(_DECODER)
        if self._closing:
            return
        said = message.message if message is not None else ""
        ended = _wait(process, time.monotonic() + _END_SECONDS)
        with self._noting:
            self._deaths.append(RankDeath(rank, process.pid, process.returncode if ended else 1, said))
            first = len(self._deaths) == 1
        if first:
            self._conclude()

    def _conclude(self) -> None:
        """Wait for the other ranks' reports, then report the first rank that ended."""
        until = time.monotonic() + _ECHO_SECONDS
        for watcher in self._watchers:
            if watcher is not threading.current_thread():
                watcher.join(max(0.0, until - time.monotonic()))
        with self._noting:
            self._on_death(min(self._deaths, key=lambda death: death.doubt))


def rank_parallel(setup: RankSetup, device: torch.device) -> Parallel:
    """Join the other ranks as a rank other than 0; the counterpart of `Ranks.join`."""
    size = setup.config.tensor_parallel_size
    return Parallel.join(setup.rank, size, device, connected_store(size, setup.port))


def _wait(process: subprocess.Popen[bytes], deadline: float) -> bool:
    """Wait for a process to end, and kill it at the deadline; return whether it ended by itself."""
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False
    return True
