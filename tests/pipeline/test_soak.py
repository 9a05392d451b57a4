"""Many short requests through the whole system: the memory of every process and of Redis stays
where it is, and no key is left.
"""

import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import openai
import pytest

from jobs.batch.client import BatchSpec, create_batch, get_batch
from tests.pipeline.results import read_results
from tests.support.fleet import LocalFleet, running_fleet
from tests.support.integrity import faults
from tests.support.leftovers import leftovers
from tests.support.processes import command_line, descendants

REQUESTS = int(os.environ.get("SOAK_REQUESTS", 25_000))
BATCH_LINES = 5000
BATCHES_AT_ONCE = 2
MAX_NUM_SEQS, CACHE_BYTES = 256, 13 << 20  # 277 blocks: they are all in use before the middle of the run
END_SECONDS = 900
# How much more the last fifth may take than the third fifth of the run, beside GROWTH_BYTES
GROWTH = 1.03
GROWTH_BYTES = 4 << 20


@pytest.mark.proof
@pytest.mark.timeout(END_SECONDS + 60)
def test_memory_stays_where_it_is_over_many_requests() -> None:
    with running_fleet(
        workers=1, lease_seconds=10, stream_interval=1.0, max_num_seqs=MAX_NUM_SEQS, api=True, cache_bytes=CACHE_BYTES
    ) as fleet:
        memory = Memory(fleet)
        began = time.monotonic()
        with LiveCalls(fleet) as live:
            for progress in soak(fleet):
                memory.sample(progress)
        seconds = time.monotonic() - began
        print(f"{REQUESTS} lines and {live.answers} live calls in {seconds:.0f} s: {REQUESTS / seconds:.0f} lines/s")
        print(memory.report())
        assert live.answers > REQUESTS / 2000
        assert memory.grown() == {}
        assert fleet.exits == {}
        assert set(fleet.stop("api", "worker").values()) == {0}
        assert leftovers(fleet.client) == []
        assert faults(fleet.client) == []


def soak(fleet: LocalFleet) -> Iterator[float]:
    """Runs all batches, a few at a time; gives the share of lines that are done, again and
    again.
    """
    waiting = [range(first, min(first + BATCH_LINES, REQUESTS)) for first in range(0, REQUESTS, BATCH_LINES)]
    running: list[tuple[str, range, Path]] = []
    done, deadline = 0, time.monotonic() + END_SECONDS
    while waiting or running:
        assert time.monotonic() < deadline
        fleet.look_after()
        while waiting and len(running) < BATCHES_AT_ONCE:
            running.append(begin(fleet, waiting.pop(0)))
        counted = 0
        for batch, lines, output in list(running):
            record = get_batch(fleet.client, batch)
            counted += record.completed
            if record.ended:
                assert (record.completed, record.failed) == (len(lines), 0), record
                assert [result["custom_id"] for result in read_results(output)] == [str(line) for line in lines]
                running.remove((batch, lines, output))
                done += len(lines)
                counted -= len(lines)
        yield (done + counted) / REQUESTS
        time.sleep(0.2)


def begin(fleet: LocalFleet, lines: range) -> tuple[str, range, Path]:
    folder = fleet.folder / f"batch-{lines.start}"
    folder.mkdir()
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    with source.open("w") as file:
        for line in lines:
            body = {
                "model": "demo",
                "prompt": [40 + line % 200, 41, 42],
                "max_tokens": 1,
                "temperature": 0,
                "seed": line,
            }
            file.write(
                json.dumps({"custom_id": str(line), "method": "POST", "url": "/v1/completions", "body": body}) + "\n"
            )
    root = fleet.store / "batches" / folder.name
    record = create_batch(
        fleet.client, BatchSpec(input=str(source), root=str(root), output=str(output), models=("demo",))
    )
    return record.id, lines, output


class LiveCalls:
    """Short streamed calls, one after the other, in a thread."""

    def __init__(self, fleet: LocalFleet) -> None:
        self._url = f"{fleet.api_url}/v1"
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.answers = 0

    def __enter__(self) -> "LiveCalls":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopping.set()
        self._thread.join(60)

    def _run(self) -> None:
        with openai.OpenAI(base_url=self._url, api_key="none", max_retries=0, timeout=60) as client:
            while not self._stopping.wait(0.01):
                chunks = list(client.completions.create(model="demo", prompt="one two", max_tokens=2, stream=True))
                self.answers += bool(chunks[-1].choices[0].finish_reason)


class Memory:
    """Resident memory of every process of a fleet, and Redis' own count, over the run."""

    def __init__(self, fleet: LocalFleet) -> None:
        self._fleet = fleet
        pids = [pid for member in fleet.members.values() for pid in (member.pid, *descendants(member.pid))]
        self._processes = {f"{short_name(pid)} {pid}": pid for pid in [*pids, fleet.redis.pid]}
        self._samples: dict[str, list[tuple[float, int]]] = defaultdict(list)

    def sample(self, progress: float) -> None:
        for name, pid in self._processes.items():
            self._samples[name].append((progress, resident_bytes(pid)))
        used = self._fleet.client.info("memory")["used_memory"]  # type: ignore[index]
        self._samples["Redis' used_memory"].append((progress, used))

    def grown(self) -> dict[str, tuple[int, int]]:
        """What took more in the last fifth of the run than in the third, by more than noise."""
        return {name: (then, now) for name, (then, now) in self._levels().items() if now > GROWTH * then + GROWTH_BYTES}

    def report(self) -> str:
        rows = sorted(self._levels().items())
        return "\n".join(
            f"{name:<34} {then / 2**20:8.1f} MB then, {now / 2**20:8.1f} MB at the end" for name, (then, now) in rows
        )

    def _levels(self) -> dict[str, tuple[int, int]]:
        return {name: (self._level(name, 0.4, 0.6), self._level(name, 0.8, 1.0)) for name in self._samples}

    def _level(self, name: str, first: float, last: float) -> int:
        return int(median(size for progress, size in self._samples[name] if first <= progress <= last))


def short_name(pid: int) -> str:
    """A process by what it runs."""
    words = command_line(pid).split()
    known = (
        "jobs.control.rq_worker",
        "jobs.control.ticker",
        "core_process",
        "pipeline worker",
        "pipeline api",
        "pipeline jobs",
        "valkey",
    )
    return next((part for part in known if part in " ".join(words)), " ".join(words[:3]))


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
