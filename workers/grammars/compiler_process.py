"""Run the process that compiles grammars: `python -m workers.grammars.compiler_process --fd N
--parent PID`.

It may die at any moment: the worker process PID kills it if a grammar takes too long, and it fails
by itself if one needs too much memory or stack. A grammar that compiles here also compiles in the
engine core, which has more of both.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import resource
import socket
import threading
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

_STACK = 32 << 20  # bytes; half the stack of the core's threads


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True, help="the worker process' id")
    given = parser.parse_args()
    connection = socket.socket(fileno=given.fd)
    become_child(given.parent, connection, "grammars", logging.WARNING)
    faulthandler.disable()  # a caller's grammar may crash this process; the worker process logs it
    reader, sender = FrameReader(connection), FrameSender(connection)
    tokens = reader.read(_VOCABULARY_DECODER)
    if tokens is not None:
        _serve(reader, sender, Vocabulary(tokens.tokens, len(tokens.tokens)))
    return 0


def _serve(reader: FrameReader, sender: FrameSender, vocabulary: Vocabulary) -> None:
    """Compile until the worker process closes the connection."""
    vocabulary.compile('start: "a"').compute_bitmask()  # initializes the library
    inbox: SimpleQueue[Compile] = SimpleQueue()
    threading.stack_size(_STACK)
    for _ in range(THREADS):
        threading.Thread(target=_compile_all, args=(inbox, sender, vocabulary), daemon=True).start()
    _bound_memory()
    sender.put(Compiled())
    while (message := reader.read(_DECODER)) is not None:
        inbox.put(message)


def _compile_all(inbox: SimpleQueue[Compile], sender: FrameSender, vocabulary: Vocabulary) -> None:
    while True:
        message = inbox.get()
        try:
            answer = Compiled(message.number, compile_format(message.wanted, vocabulary))
        except FormatError as error:
            answer = Compiled(message.number, error=str(error))
        except MemoryError:
            answer = Compiled(message.number, error="It needs too much memory to compile; make it smaller.")
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            answer = Compiled(message.number, error=f"It cannot be compiled: {reason or type(error).__name__}.")
        sender.put(answer)


def _bound_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    if pages:
        limit = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    leave(main())
