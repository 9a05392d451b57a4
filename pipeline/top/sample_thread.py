"""A thread that takes samples, so that an unavailable Redis blocks neither keys nor frames."""

import contextlib
import queue
import socket
import threading
from typing import Self

from jobs.queue.request_queue import Queue
from pipeline.top.sample import Sample, take_sample


class SampleThread:
    """A context in which a sample is taken every `interval` seconds.

    `fileno` is readable when there is news. Leaving the context does not wait for the thread.
    """

    def __init__(self, source: Queue, interval: float) -> None:
        self._source = source
        self._interval = interval
        self._news: queue.SimpleQueue[Sample | Exception] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._ringer.setblocking(False)

    def __enter__(self) -> Self:
        threading.Thread(target=self._read, name="samples", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()

    def fileno(self) -> int:
        return self._bell.fileno()

    def news(self) -> list[Sample | Exception]:
        """Return the samples since the last call, and the errors of failed ones."""
        with contextlib.suppress(BlockingIOError):
            self._bell.recv(4096)
        found: list[Sample | Exception] = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._news.get_nowait())
        return found

    def _read(self) -> None:
        while not self._ended.wait(self._interval):
            try:
                self._news.put(take_sample(self._source))
            except Exception as error:
                self._news.put(error)
            with contextlib.suppress(BlockingIOError):
                self._ringer.send(b"\0")
