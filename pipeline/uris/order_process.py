"""Processes that carry out an order on a store, and their parent's side.

A separate process can be stopped at once, whatever a store is doing, and its memory is limited.
"""

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import msgspec

from batch_inference_pipeline.command import python_command
from jobs.batch.input_files import OWN_FILE
from jobs.process import die_with_parent, limit_resource
from pipeline.errors import CommandEnd, Interrupted, Refused, Unfinished, explained, one_line
from pipeline.signals import Signals
from pipeline.uris.stores import failures
from pipeline.uris.uri import Uri

Given = TypeVar("Given", bound="StoreOrder")


class StoreOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The order for a process."""

    uri: str
    memory_bytes: int = OWN_FILE.memory_bytes


def run_order(module: str, order: StoreOrder, signals: Signals, interrupted: str) -> None:
    """Run a process until it has carried out its order. Its output goes to stderr.

    Raise `Refused`, `Unfinished`, and `Interrupted` with the message `interrupted`.
    """
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stderr:
        stdin.write(msgspec.json.encode(order))  # not as an argument, since a URI may hold secrets
        stdin.seek(0)
        process = subprocess.Popen(
            python_command(module),
            stdin=stdin,
            stdout=2,
            stderr=stderr,
            start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        try:
            while process.poll() is None:
                signals.wait(1.0)  # SIGCHLD ends it
                if signals.stops:
                    raise Interrupted(interrupted)
        finally:
            process.kill()
            process.wait()
        stderr.seek(0)
        reason = stderr.read().decode(errors="replace").strip().rpartition("\n")[2]
    if process.returncode:
        end = Refused if process.returncode == Refused.exit_code else Unfinished
        raise end(reason or f"the process for {Uri(order.uri)} ended with exit code {process.returncode}")


def carry_out(decoder: msgspec.json.Decoder[Given], verb: str, action: Callable[[Given], None]) -> None:
    """Read the order from stdin and carry it out; print an error as one sentence on stderr.

    Exit without freeing open streams, so that an object appears only after it was written whole.
    """
    order = decoder.decode(sys.stdin.buffer.read())
    uri, code = Uri(order.uri), 0
    limit_resource(resource.RLIMIT_DATA, order.memory_bytes)
    try:
        with failures(uri, verb):
            action(order)
    except MemoryError:
        code = _print(Refused(f"to {verb} {uri} takes more than {order.memory_bytes >> 20} MiB of memory"))
    except Exception as error:
        end = error if isinstance(error, CommandEnd) else explained(error)
        code = _print(end or Unfinished(f"failed to {verb} {uri}: {one_line(error)}"))
    os._exit(code)


def _print(end: CommandEnd) -> int:
    print(end.message, file=sys.stderr, flush=True)
    return end.exit_code
