"""An engine core that records the time of each output token, for `queue_latency`.

    python -m benchmarks.stamped_core --fd N --parent PID

It is the engine core itself or, with BENCHMARK_PACE_MS in the environment, a core without a model
that gives every running request a token at this interval in milliseconds. The records go to the
file BENCHMARK_STAMPS.
"""

import functools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import msgspec

from workers.engine import core_process
from workers.engine.messages.config import EngineConfig
from workers.engine.messages.core import (
    AbortRequests,
    AddRequests,
    EngineRequest,
    Finish,
    Ready,
    Shutdown,
    Stats,
    StepOutput,
    ToCore,
)
from workers.engine.messages.transport import FrameReader, FrameSender, frame
from workers.engine.process import leave

T = TypeVar("T")

PACE, STAMPS = "BENCHMARK_PACE_MS", "BENCHMARK_STAMPS"
_FIRST_TOKEN, _TOKENS = 1000, 20_000  # token ids of the paced core


class Added(msgspec.Struct, tag="added", array_like=True):
    """The prompt of an added request."""

    request_id: int
    prompt: list[int]


class Aborted(msgspec.Struct, tag="aborted", array_like=True):
    """The time of an order to end requests, on the monotonic clock."""

    at: float
    request_ids: list[int]


class Step(msgspec.Struct, tag="step", array_like=True):
    """The time of a step's output tokens, on the monotonic clock, and their requests."""

    at: float
    request_ids: list[int]
    counts: list[int]
    token_ids: list[int]


Note = Added | Aborted | Step


def read_stamps(path: Path) -> list[Note]:
    """Return the records of a core."""
    decoder = msgspec.msgpack.Decoder(Note)
    notes, position, data = [], 0, path.read_bytes()
    while position < len(data):
        end = position + 4 + int.from_bytes(data[position : position + 4], "little")
        notes.append(decoder.decode(data[position + 4 : end]))
        position = end
    return notes


class Notes:
    """A file of records; each record is written at once."""

    def __init__(self) -> None:
        self._file = open(os.environ[STAMPS], "ab", buffering=0)  # noqa: SIM115
        self._lock = threading.Lock()

    def add(self, note: Note) -> None:
        with self._lock:
            self._file.write(frame(note))


class StampedReader(FrameReader):
    """Records added requests and orders to end requests."""

    def read(self, decoder: "msgspec.msgpack.Decoder[T]") -> T | None:
        message = super().read(decoder)
        for one in message.requests if isinstance(message, AddRequests) else ():
            _notes().add(Added(one.request_id, one.prompt_token_ids))
        if isinstance(message, AbortRequests):
            _notes().add(Aborted(time.monotonic(), message.request_ids))
        return message


class StampedSender(FrameSender):
    """Records the steps that are sent."""

    def put(self, message: msgspec.Struct) -> None:
        at = time.monotonic()
        super().put(message)
        if isinstance(message, StepOutput):
            _notes().add(Step(at, message.request_ids, message.counts, message.token_ids))


@functools.cache
def _notes() -> Notes:
    return Notes()


def main() -> int:
    core_process.FrameReader, core_process.FrameSender = StampedReader, StampedSender  # type: ignore[misc]
    if PACE in os.environ:
        core_process._serve = _serve_paced
    return core_process.main()


def _serve_paced(config: EngineConfig, inbox: "SimpleQueue[ToCore]", sender: FrameSender, *_: object) -> None:
    slots = config.max_num_seqs or 64
    ready = Ready(
        max_model_len=config.max_model_len or 1024,
        num_blocks=64 * slots + 1,
        block_size=16,
        vocab_size=32_000,
        eos_token_ids=[0],
        dtype="none",
        device="none",
        max_num_seqs=slots,
        max_num_batched_tokens=2048,
        depth=0,
        threads=1,
        weights_seconds=0.0,
    )
    sender.put(ready)
    PacedCore(float(os.environ[PACE]) / 1000, slots).run(inbox, sender.put)


class PacedCore:
    """Gives the oldest `slots` requests a token each, every `pace` seconds."""

    def __init__(self, pace: float, slots: int) -> None:
        self._pace = pace
        self._slots = slots
        self._requests: dict[int, EngineRequest] = {}  # in the order of their arrival
        self._given: dict[int, int] = {}  # tokens
        self._aborted: list[int] = []
        self._steps = self._tokens = 0

    def run(self, inbox: "SimpleQueue[ToCore]", put: Callable[[StepOutput], None]) -> None:
        """Serve until a `Shutdown` message."""
        due = 0.0
        while True:
            idle = not (self._requests or self._aborted)
            wait = None if idle else max(0.0, due - time.monotonic())
            try:
                message: Any = inbox.get(timeout=wait)
            except Empty:
                due = max(due + self._pace, time.monotonic())
                put(self._step())
                continue
            if isinstance(message, Shutdown):
                return
            if idle:
                due = time.monotonic() + self._pace
            self._take(message)

    def _take(self, message: ToCore) -> None:
        if isinstance(message, AddRequests):
            self._requests.update((one.request_id, one) for one in message.requests)
            self._given.update((one.request_id, len(one.output_token_ids)) for one in message.requests)
        elif isinstance(message, AbortRequests):
            gone = [one for one in message.request_ids if self._requests.pop(one, None) is not None]
            self._aborted += gone

    def _step(self) -> StepOutput:
        running = list(self._requests)[: self._slots]
        tokens = [_FIRST_TOKEN + (7 * self._given[one] + one) % _TOKENS for one in running]
        finish = [self._advance(one) for one in running]
        aborted, self._aborted = self._aborted, []
        self._steps += 1
        self._tokens += len(running)
        return StepOutput(
            self._steps,
            running + aborted,
            [1] * len(running) + [0] * len(aborted),
            tokens,
            finish + [Finish.ABORT] * len(aborted),
            [-1] * (len(running) + len(aborted)),
            [0] * (len(running) + len(aborted)),
            self._stats(),
        )

    def _advance(self, request_id: int) -> Finish:
        """Count a token; return whether it was the last one."""
        self._given[request_id] += 1
        if self._given[request_id] < self._requests[request_id].sampling.max_tokens:
            return Finish.RUNNING
        del self._requests[request_id], self._given[request_id]
        return Finish.LENGTH

    def _stats(self) -> Stats:
        running = min(len(self._requests), self._slots)
        waiting = len(self._requests) - running
        return Stats(running=running, waiting=waiting, steps=self._steps, tokens=self._tokens)


if __name__ == "__main__":
    leave(main())
