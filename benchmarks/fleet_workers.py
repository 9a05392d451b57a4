"""Workers without engines for the benchmark of a fleet: each claims, publishes, commits and renews
by the clock, like a worker process with a GPU of a given pace.

    python -m benchmarks.fleet_workers --redis-url unix:///run/redis.sock --count 8 --tokens 128
"""

import argparse
import heapq
import itertools
import os
import random
import socket
import time
from collections import deque

from benchmarks.gpu_pace import QWEN3_06B, SWEEP_SECONDS, GpuPace
from benchmarks.simulated_lines import MODEL, delta_of, finished_of
from jobs.process import add_redis_url, die_with_parent
from jobs.protocol.requests import Claim
from jobs.queue.connection import connect
from jobs.queue.registry import WorkerRecord
from jobs.queue.request_queue import Queue
from jobs.queue.scripts import MAX_ITEMS
from workers.replica.outbox import BACKLOG_SECONDS

_PUBLISHED_TOGETHER = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_redis_url(parser)
    parser.add_argument("--count", type=int, required=True, help="workers of this process")
    parser.add_argument("--tokens", type=int, required=True, help="output tokens of a line, on average")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    die_with_parent()
    queue, rng = Queue(connect(args.redis_url)), random.Random(args.seed)
    run([SimulatedWorker(queue, QWEN3_06B, args.tokens, rng) for _ in range(args.count)], rng)


def run(workers: list["SimulatedWorker"], rng: random.Random) -> None:
    """Let the workers act by the clock until the process ends; late actions run at once."""
    numbers, now = itertools.count(), time.monotonic()
    due = []
    for worker in workers:
        for interval, action in worker.actions:
            due.append((now + rng.random() * interval, next(numbers), interval, action))
    heapq.heapify(due)
    while True:
        when, _, interval, action = due[0]
        if (early := when - time.monotonic()) > 0:
            time.sleep(early)
        action()
        heapq.heapreplace(due, (max(when + interval, time.monotonic()), next(numbers), interval, action))


class RunningLine:
    """A line in a slot."""

    def __init__(self, claim: Claim, began: float, tokens: int) -> None:
        self.claim = claim
        self.began = began
        self.tokens = tokens
        self.publishes = 0


class SimulatedWorker:
    """Runs as many lines at once as its pace sets, each at an even rate."""

    def __init__(self, queue: Queue, pace: GpuPace, tokens: int, rng: random.Random) -> None:
        self._queue = queue
        self._pace = pace
        self._tokens = tokens
        self._rng = rng
        self._name = f"simulated-{rng.getrandbits(64):016x}"
        self._seq = itertools.count(1)
        self._waiting: deque[Claim] = deque()
        self._running: list[tuple[float, int, RunningLine]] = []  # by their ends
        self._ended: list[RunningLine] = []
        self._generated = 0
        self._is_first = True
        interval = queue.settings.lease_seconds / 4
        self.actions = [
            (pace.seconds(1), self._step),
            (BACKLOG_SECONDS, self._commit),
            (SWEEP_SECONDS, self._publish),
            (interval, self._renew),
        ]
        record = WorkerRecord(self._name, [MODEL], "ready", 4096, time.time(), socket.gethostname(), os.getpid())
        queue.register_worker(record)

    def _step(self) -> None:
        """Finish lines at their ends, and claim if a sixteenth of the slots is free."""
        now = time.monotonic()
        while self._running and self._running[0][0] <= now:
            self._ended.append(heapq.heappop(self._running)[2])
        slots = self._pace.slots
        room = slots + slots // 8 - len(self._running) - len(self._waiting)
        if room >= slots // 16:
            self._waiting += self._queue.claim(self._name, next(self._seq), min(room, MAX_ITEMS), models=[MODEL])
        while self._waiting and len(self._running) < slots:
            self._start(self._waiting.popleft(), now)
        self._is_first = self._is_first and not self._running

    def _start(self, claim: Claim, now: float) -> None:
        """Start a line; the first lines start at random progress, as in a running fleet."""
        tokens = round(self._tokens * self._rng.uniform(0.5, 1.5))
        seconds = self._pace.seconds(tokens)
        line = RunningLine(claim, now - (self._rng.random() * seconds if self._is_first else 0), tokens)
        heapq.heappush(self._running, (line.began + seconds, id(line), line))

    def _commit(self) -> None:
        if self._ended:
            ended, self._ended = self._ended, []
            each = self._pace.tokens_of_a_publish
            self._generated += sum(line.tokens - line.publishes * each for line in ended)
            finished = [finished_of(line.claim, line.publishes * each, line.tokens) for line in ended]
            self._queue.commit(self._name, finished, self._generated)

    def _publish(self) -> None:
        now, each = time.monotonic(), self._pace.tokens_of_a_publish
        interval = self._queue.settings.stream_interval
        late = [line for _, _, line in self._running if now - line.began >= (line.publishes + 1) * interval]
        deltas = []
        for line in late:
            before = line.publishes * each
            if before + each < line.tokens:
                deltas.append(delta_of(line.claim, before, before + each))
                line.publishes += 1
        self._generated += each * len(deltas)
        for start in range(0, len(deltas), _PUBLISHED_TOGETHER):
            self._queue.publish(self._name, deltas[start : start + _PUBLISHED_TOGETHER], self._generated)

    def _renew(self) -> None:
        held = [*self._waiting, *(line.claim for _, _, line in self._running), *(line.claim for line in self._ended)]
        self._queue.renew(self._name, [(claim.key, claim.fence) for claim in held], self._generated)


if __name__ == "__main__":
    main()
