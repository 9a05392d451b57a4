"""The private Redis of one command.

A separate thread restarts it when it ends, so that no call to Redis can block the restart.
"""

import threading
from collections.abc import Callable
from pathlib import Path

from jobs.host import WakeUp, wait_for_end
from jobs.server import PrivateServer, ServerError

_LOOK_SECONDS = 0.1
_STARTS_ALLOWED = 10


class KeptServer:
    """A context in which a private server runs.

    The kernel kills the server when the thread that started it ends, so one thread starts,
    restarts and stops it.
    """

    def __init__(self, directory: Path, say: Callable[[str], None]) -> None:
        self.failure: str | None = None  # the reason why it is not restarted anymore
        self.starts = 0
        self._server = PrivateServer(directory)
        self._say = say
        self._started = threading.Event()
        self._stopping = threading.Event()
        self._stop_order = WakeUp()  # wakes the thread
        self._start_error: Exception | None = None
        self._thread = threading.Thread(target=self._keep, name="private-redis", daemon=True)
        self.url = ""

    def __enter__(self) -> "KeptServer":
        self._thread.start()
        self._started.wait()
        if self._start_error is not None:
            self._thread.join()
            self._stop_order.close()
            raise self._start_error
        return self

    def __exit__(self, *error: object) -> None:
        self._stopping.set()
        self._stop_order.ring()
        self._thread.join()
        self._stop_order.close()

    def _keep(self) -> None:
        try:
            try:
                self._server.start()
                self.url = self._server.url
            except Exception as error:
                self._start_error = error
                return
            finally:
                self._started.set()
            self.starts = 1
            while not self._stops():
                if self._server.is_running():
                    continue
                if self.starts > _STARTS_ALLOWED:
                    self.failure = f"the private Redis ended {self.starts} times"
                    return
                self.starts += 1
                self._start_again()
        finally:
            self._server.stop()

    def _stops(self) -> bool:
        """Wait until the server ends or is to be stopped; return whether it is to be stopped."""
        if not self._server.is_running():
            return self._stopping.wait(_LOOK_SECONDS)
        wait_for_end(self._server.pid, self._server.is_running, self._stop_order)
        return self._stopping.is_set() or self._stopping.wait(_LOOK_SECONDS)

    def _start_again(self) -> None:
        self._say("the private Redis ended; restarting it")
        self._server.stop()
        try:
            self._server.start()
        except (ServerError, OSError) as error:
            self._say(f"the private Redis cannot be started: {error}")
