"""Wait in the main thread, without polling, for stop signals, ends of children and timeouts."""

import os
import select
import signal
import socket
from types import FrameType

from jobs.host import WakeUp

_PATIENCE = 2
_LEFT_IGNORED = (signal.SIGINT, signal.SIGHUP)  # a shell's `&` and `nohup` ignore them
_WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)


class Signals:
    """A context in which `wait` returns as soon as one of the signals arrives.

    `stops` counts the stop signals; the third ends the process at once. SIGHUP counts once, since
    a shell and the kernel may both send it. SIGHUP and SIGINT stay ignored if the process started
    that way.
    """

    def __init__(self) -> None:
        self.stops = 0
        self._hung_up = False
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._before: dict[signal.Signals, signal._HANDLER] = {}
        self._before_fd = -1

    def __enter__(self) -> "Signals":
        self._before = {number: signal.signal(number, self._note) for number in _WATCHED if _is_watchable(number)}
        self._before_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *error: object) -> None:
        signal.set_wakeup_fd(self._before_fd)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._reader.close()
        self._writer.close()

    def wait(self, seconds: float, *others: int | WakeUp) -> bool:
        """Wait for a signal, a readable file of `others`, or `seconds`.

        Return whether a signal arrived.
        """
        files: list[int | WakeUp | socket.socket] = [self._reader, *others]
        readable, _, _ = select.select(files, [], [], max(0.0, seconds))
        if self._reader in readable:
            self._reader.recv(4096)
        return self._reader in readable

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGCHLD or (number == signal.SIGHUP and self._hung_up):
            return
        self._hung_up = self._hung_up or number == signal.SIGHUP
        self.stops += 1
        if self.stops > _PATIENCE:
            os._exit(128 + signal.SIGINT)  # the children die with this process


def _is_watchable(number: signal.Signals) -> bool:
    return number not in _LEFT_IGNORED or signal.getsignal(number) != signal.SIG_IGN
