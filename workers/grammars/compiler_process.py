"""Run the process that compiles grammars: `python -m workers.grammars.compiler_process --fd N
--parent PID --seconds S`.

It may die at any moment: the worker process PID kills it if a grammar takes more than S seconds of
a processor, and it fails by itself if one needs too much memory or stack. A grammar that compiles
here also compiles in the engine core, which has more of both.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import resource
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue

import msgspec

from workers.engine.guides.vocabulary import Vocabulary
from workers.engine.messages.core import SetVocabulary
from workers.engine.messages.transport import FrameReader, FrameSender
from workers.engine.process import become_child, leave
from workers.grammars.compiler import compile_format
from workers.grammars.messages import THREADS, Compile, Compiled
from workers.text.errors import FormatError

MEMORY = 1 << 30
"""Bytes of address space for compiling, beyond the process's own at its start."""

_VOCABULARY_DECODER = msgspec.msgpack.Decoder(SetVocabulary)
_DECODER = msgspec.msgpack.Decoder(Compile)

_LEAST_PAUSE = 0.05  # seconds between two looks at the clocks
_STACK = 32 << 20  # bytes; half the stack of the core's threads


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True, help="the worker process' id")
    parser.add_argument("--seconds", type=float, required=True, help="of a processor, for one grammar")
    given = parser.parse_args()
    connection = socket.socket(fileno=given.fd)
    become_child(given.parent, connection, "grammars", logging.WARNING)
    faulthandler.disable()  # a caller's grammar may crash this process; the worker process logs it
    reader, sender = FrameReader(connection), FrameSender(connection)
    tokens = reader.read(_VOCABULARY_DECODER)
    if tokens is not None:
        _serve(reader, sender, Vocabulary(tokens.tokens, len(tokens.tokens)), given.seconds)
    return 0


def _serve(reader: FrameReader, sender: FrameSender, vocabulary: Vocabulary, seconds: float) -> None:
    """Compile until the worker process closes the connection."""
    vocabulary.compile('start: "a"').compute_bitmask()  # initializes the library
    inbox: SimpleQueue[Compile] = SimpleQueue()
    threading.stack_size(_STACK)
    clocks = [ThreadClock(seconds) for _ in range(THREADS)]
    for clock in clocks:
        threading.Thread(target=_compile_all, args=(inbox, sender, vocabulary, clock), daemon=True).start()
    threading.Thread(target=_report_overdue, args=(clocks, sender, seconds), daemon=True).start()
    _bound_memory()
    sender.put(Compiled())
    while (message := reader.read(_DECODER)) is not None:
        inbox.put(message)


class ThreadClock:
    """The processor time of a thread for the grammar that it compiles."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._current: tuple[int, int, float] | None = None  # number, clock, its time at the start

    def start(self, number: int) -> None:
        """Begin to count, in the thread."""
        self._current = number, time.pthread_getcpuclockid(threading.get_ident()), time.thread_time()

    def stop(self) -> None:
        self._current = None

    def left(self) -> tuple[int, float]:
        """Return the grammar's number, 0 for none, and the seconds that are left for it."""
        current = self._current
        if current is None:
            return 0, self._seconds
        number, clock, began = current
        return number, self._seconds - (time.clock_gettime(clock) - began)


def _report_overdue(clocks: Sequence[ThreadClock], sender: FrameSender, seconds: float) -> None:
    """Report each grammar that has used up its processor time; the worker process ends this one."""
    reported: set[int] = set()
    while True:
        all_left = [clock.left() for clock in clocks]
        for number, left in all_left:
            if left <= 0 and number not in reported:
                reported.add(number)
                error = f"It takes longer than {seconds:g} s of a processor to compile; make it smaller."
                sender.put(Compiled(number, error=error, unfinished=True))
        time.sleep(max(_LEAST_PAUSE, min((left for _, left in all_left if left > 0), default=seconds)))


def _compile_all(inbox: SimpleQueue[Compile], sender: FrameSender, vocabulary: Vocabulary, clock: ThreadClock) -> None:
    while True:
        message = inbox.get()
        clock.start(message.number)
        answer = _compile(message, vocabulary)
        clock.stop()
        sender.put(answer)


def _compile(message: Compile, vocabulary: Vocabulary) -> Compiled:
    try:
        return Compiled(message.number, compile_format(message.wanted, vocabulary))
    except FormatError as error:
        return Compiled(message.number, error=str(error))
    except MemoryError:
        return Compiled(message.number, error="It needs too much memory to compile; make it smaller.")
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        return Compiled(message.number, error=f"It cannot be compiled: {reason or type(error).__name__}.")


def _bound_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    if pages:
        limit = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    leave(main())
