"""The number of GPUs that one Redis serves: a real server, and 1 to 256 workers without engines
(`fleet_workers`) that claim, publish and commit at the pace of an H100, until more workers bring
no gain.

    python -m benchmarks.fleet
    python -m benchmarks.fleet --tokens 512 --workers 1 16 64

Lines are fed and their results drained by the calls of the control plane, without its files. The
server shares the machine's cores with the workers: its processor time per line is what counts, and
its share of a core says how far the figure was measured. `limit` is what a whole core would give.
"""

import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.gpu_pace import QWEN3_06B
from benchmarks.processes import own_cpu_seconds
from benchmarks.redis_time import OUTPUTS, processor_seconds, server_name
from benchmarks.report import arguments, write_report
from benchmarks.simulated_lines import MODEL, request_of
from jobs.protocol.requests import Request
from jobs.queue import keys
from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue
from jobs.queue.scripts import MAX_ITEMS
from jobs.server import PrivateServer

WORKERS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_BATCHES = 4  # each of another tenant
_PART_LINES = 1000
_GROWTH = 1.1  # twice the workers are limited by Redis if they gain no more than this factor
_PAUSE_SECONDS = 0.05


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(OUTPUTS), help="output tokens of a line")
    parser.add_argument("--workers", type=int, nargs="+", default=list(WORKERS))
    parser.add_argument("--processes", type=int, default=8, help="that run the workers")
    parser.add_argument("--seconds", type=float, default=8.0, help="for which each number of workers is measured")
    args = parser.parse_args()
    curves = {}
    for tokens in args.tokens:
        points: list[dict[str, Any]] = []
        for count in args.workers:
            points.append(measure(count, tokens, args.processes, args.seconds, args.seed))
            print(f"{tokens} tokens: {points[-1]}", file=sys.stderr, flush=True)
            if len(points) > 1 and points[-1]["lines_per_second"] < _GROWTH * points[-2]["lines_per_second"]:
                break
        curves[str(tokens)] = points
    pace = {"model": QWEN3_06B.model, "tokens_per_second": QWEN3_06B.tokens_per_second, "slots": QWEN3_06B.slots}
    write_report("fleet", {"server": server_name(), "pace": pace, "curves": curves}, args.out, args.seed)


def measure(count: int, tokens: int, processes: int, seconds: float, seed: int) -> dict[str, Any]:
    """Return the throughput of `count` workers on lines of `tokens` tokens, and Redis' load."""
    with tempfile.TemporaryDirectory() as folder, PrivateServer(Path(folder)) as server:
        queue = Queue(connect(server.url))
        feeder = Feeder(queue, tokens, QWEN3_06B.slots * count)
        feeder.run(0.0)
        with _workers(server.url, count, tokens, processes, seed) as children:
            while queue.redis.hlen(keys.LEASE) < QWEN3_06B.slots * count:
                feeder.run(_PAUSE_SECONDS)
            feeder.run(QWEN3_06B.seconds(tokens))
            before = _state(queue, children)
            feeder.run(seconds)
            spent = [after - earlier for earlier, after in zip(before, _state(queue, children), strict=True)]
    elapsed, lines, delivered, redis, simulated = spent
    each = 1e6 * redis / lines
    return {
        "workers": count,
        "asked": round(count * QWEN3_06B.lines_per_second(tokens)),
        "lines_per_second": round(lines / elapsed),
        "tokens_per_second": round(delivered / elapsed),
        "redis_us_per_line": round(each, 1),
        "redis_core": round(redis / elapsed, 3),
        "workers_cores": round(simulated / elapsed, 3),
        "limit_lines_per_second": round(1e6 / each),
        "limit_gpus": round(1e6 / each / QWEN3_06B.lines_per_second(tokens)),
    }


class Feeder:
    """Replaces the control plane: it feeds lines of some batches and drains their results."""

    def __init__(self, queue: Queue, tokens: int, window: int) -> None:
        self._queue = queue
        self._request: Request = request_of(0, tokens)
        self._window = max(MAX_ITEMS, 2 * window // _BATCHES)
        self._cursors = {f"batch_{number}": 0 for number in range(_BATCHES)}
        self._parts = itertools.count()
        for batch in self._cursors:
            queue.create_batch(batch, 1 << 30, tenant=batch, state="in_progress", fields={"line_models": [MODEL]})

    def run(self, seconds: float) -> None:
        """Feed and drain for `seconds`, at least once."""
        end = time.monotonic() + seconds
        while True:
            for batch in self._cursors:
                self._feed(batch)
                self._drain(batch)
            if time.monotonic() >= end:
                return
            time.sleep(_PAUSE_SECONDS)

    def _feed(self, batch: str) -> None:
        while self._queue.redis.llen(keys.ready(batch, MODEL)) < self._window:
            start = self._cursors[batch]
            end = self._cursors[batch] = start + MAX_ITEMS
            assert self._queue.ingest(batch, [(line, self._request) for line in range(start, end)], start, end)

    def _drain(self, batch: str) -> None:
        if self._queue.undrained_lines(batch) >= _PART_LINES:
            lines = [line for line, _ in self._queue.results(batch, _PART_LINES)]
            assert self._queue.drained(batch, f"part-{next(self._parts)}", lines)


def _state(queue: Queue, children: list[subprocess.Popen[bytes]]) -> list[float]:
    ended, delivered = queue.requests_ended(), queue.token_totals().delivered
    simulated = sum(own_cpu_seconds(child.pid) for child in children)
    return [time.monotonic(), ended, delivered, processor_seconds(queue), simulated]


@contextmanager
def _workers(url: str, count: int, tokens: int, processes: int, seed: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    children = []
    try:
        for number in range(processes):
            if own := (count + number) // processes:
                command = [sys.executable, "-m", "benchmarks.fleet_workers", "--redis-url", url]
                command += ["--count", str(own), "--tokens", str(tokens), "--seed", str(seed + number)]
                children.append(subprocess.Popen(command))
        yield children
    finally:
        for child in children:
            child.kill()
            child.wait()


if __name__ == "__main__":
    main()
