"""Redis' processor time per line, call by call: every line of a batch is ingested, then all are
claimed, published, committed and drained, on a server of their own that does nothing else.

    python -m benchmarks.redis_time --turns 3
    STREAM_INTERVAL=10 python -m benchmarks.redis_time --out /tmp/results

Lines are short, of medium length and long, in groups as a worker with the pace of an H100 makes
them (`gpu_pace`): the shorter its lines, the more of them end in one interval; the more it runs at
once, the more often each is published.
"""

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu_pace import QWEN3_06B, QWEN3_8B, GpuPace
from benchmarks.report import arguments, write_report
from benchmarks.simulated_lines import MODEL, delta_of, finished_of, request_of
from jobs.protocol.requests import Claim
from jobs.queue.connection import connect
from jobs.queue.registry import WorkerRecord
from jobs.queue.request_queue import Queue
from jobs.queue.scripts import MAX_ITEMS
from jobs.server import PrivateServer

OUTPUTS = (16, 128, 512)
_COLUMNS = [*((QWEN3_06B, tokens) for tokens in OUTPUTS), (QWEN3_8B, OUTPUTS[-1])]
BATCH = "batch_simulated"
_WORKERS = 16
_PART_BYTES = 2 * 1024 * 1024


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--lines", type=int, default=20_000)
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    figures = {
        f"{pace.model}, {tokens} tokens": _median([measure(args.lines, tokens, pace) for _ in range(args.turns)])
        for pace, tokens in _COLUMNS
    }
    report = {"server": server_name(), "lines": args.lines, "us_per_line": figures}
    write_report("redis-time", report, args.out, args.seed)


def _median(turns: list[dict[str, float]]) -> dict[str, float]:
    figures = {name: round(statistics.median(turn[name] for turn in turns), 2) for name in turns[0]}
    return figures | {"all": round(sum(figures.values()), 1)}


def measure(lines: int, tokens: int, pace: GpuPace = QWEN3_06B) -> dict[str, float]:
    """Return µs of Redis' processor time per line, by call."""
    with tempfile.TemporaryDirectory() as folder, PrivateServer(Path(folder)) as server:
        return dict(_Life(Queue(connect(server.url)), lines, tokens, pace).phases())


class _Life:
    """The lines of one batch, which go through each step together."""

    def __init__(self, queue: Queue, lines: int, tokens: int, pace: GpuPace) -> None:
        self._queue = queue
        self._lines = lines
        self._tokens = tokens
        self._pace = pace
        self._groups = pace.groups(tokens)
        self._held: dict[str, list[Claim]] = {f"worker-{number}": [] for number in range(_WORKERS)}

    def phases(self) -> Iterator[tuple[str, float]]:
        for worker in self._held:
            self._queue.register_worker(WorkerRecord(worker, [MODEL], "ready", 4096, time.time(), "host", 1))
        self._queue.create_batch(BATCH, self._lines, state="in_progress", fields={"line_models": [MODEL]})
        yield "ingest", self._measured(self._ingest)
        yield "claim", self._measured(self._claim)
        yield "publish", self._measured(self._publish)
        yield "commit", self._measured(self._commit)
        yield "drain", self._measured(self._drain)

    def _measured(self, action: Callable[[], None]) -> float:
        before = processor_seconds(self._queue)
        action()
        return 1e6 * (processor_seconds(self._queue) - before) / self._lines

    def _ingest(self) -> None:
        for start in range(0, self._lines, MAX_ITEMS):
            end = min(self._lines, start + MAX_ITEMS)
            rows = [(line, request_of(line, self._tokens)) for line in range(start, end)]
            assert self._queue.ingest(BATCH, rows, start, end)

    def _claim(self) -> None:
        for seq, worker in zip(itertools.count(1), itertools.cycle(self._held)):
            claims = self._queue.claim(worker, seq, self._groups.claim, models=[MODEL])
            if not claims:
                return
            self._held[worker] += claims

    def _publish(self) -> None:
        each = self._pace.tokens_of_a_publish
        for before in range(0, self._pace.published(self._tokens), each):
            for worker, group in self._grouped(self._groups.publish):
                assert not self._queue.publish(worker, [delta_of(claim, before, before + each) for claim in group])

    def _commit(self) -> None:
        published = self._pace.published(self._tokens)
        for worker, group in self._grouped(self._groups.commit):
            assert not self._queue.commit(worker, [finished_of(claim, published, self._tokens) for claim in group])

    def _drain(self) -> None:
        size = len(finished_of(self._held["worker-0"][0], 0, self._tokens).result.body)
        for number in itertools.count():
            found = self._queue.results(BATCH, min(4000, _PART_BYTES // size))
            if not found:
                return
            assert self._queue.drained(BATCH, f"part-{number}", [line for line, _ in found])

    def _grouped(self, count: int) -> Iterator[tuple[str, list[Claim]]]:
        for start in range(0, max(map(len, self._held.values())), count):
            for worker, claims in self._held.items():
                if group := claims[start : start + count]:
                    yield worker, group


def server_name() -> str:
    """Return the version and the allocator of the server that measurements start."""
    with tempfile.TemporaryDirectory() as folder, PrivateServer(Path(folder)) as server:
        info: Any = connect(server.url).info()
    name, version = ("Valkey", info["valkey_version"]) if "valkey_version" in info else ("Redis", info["redis_version"])
    return f"{name} {version}, {info['mem_allocator']}"


def processor_seconds(queue: Queue) -> float:
    """Return the processor seconds that the server has used."""
    used: Any = queue.redis.info("cpu")
    return float(used["used_cpu_user_main_thread"] + used["used_cpu_sys_main_thread"])


if __name__ == "__main__":
    main()
