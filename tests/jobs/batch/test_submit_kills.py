"""Batches of the API under a control plane that is killed again and again, while they are
cancelled, expire and are read.
"""

import json
import random
import threading
import time
from pathlib import Path

import pytest
import redis

from jobs.batch.client import BatchRecord, cancel_batch, get_batch
from jobs.batch.completion_log import read_log
from jobs.batch.manifest import load_manifest
from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue
from tests.support.control_plane import Answering, ControlPlane, failing
from tests.support.integrity import faults
from tests.support.redis_server import running_server
from tests.support.store_batches import content_of, lines_of, log_of, put, serve, store_of, submit_file
from tests.support.waiting import wait_until

LINES = 150
FORWARD = {
    "validating": 0,
    "in_progress": 1,
    "finalizing": 2,
    "cancelling": 3,
    "completed": 4,
    "expired": 4,
    "cancelled": 4,
}


class BatchReader(threading.Thread):
    """Looks at batches and their logs all the time, and holds that nothing goes back."""

    def __init__(self, client: redis.Redis, batches: list[str]) -> None:
        super().__init__(daemon=True)
        self._client = client
        self._batches = batches
        self.stopping = threading.Event()
        self.found: list[str] = []
        self.error: Exception | None = None
        self.looks = 0

    def run(self) -> None:
        try:
            self._look_again_and_again()
        except Exception as error:
            self.error = error

    def _look_again_and_again(self) -> None:
        last: dict[str, tuple[int, int, int, bytes]] = {}
        while not self.stopping.is_set():
            for batch in self._batches:
                record = get_batch(self._client, batch)
                seen = (FORWARD[record.state], record.stored_completed, record.stored_failed, self._log(record))
                before = last.get(batch, (0, 0, 0, b""))
                if any(new < old for new, old in zip(seen[:3], before[:3], strict=True)) or not seen[3].startswith(
                    before[3]
                ):
                    self.found.append(f"{batch} went from {before} to {seen}")
                last[batch] = seen
                self.looks += 1

    def _log(self, record: BatchRecord) -> bytes:
        manifest = load_manifest(record.spec.root)
        assert manifest is not None
        return b"".join(read_log(record.spec.root, manifest.logged, 0)[0])


@pytest.mark.proof
def test_kills_lose_and_double_nothing(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    store = tmp_path / "store"
    with running_server() as server, Answering(server.url, failing(5, 50), limit=16, pause=0.002):
        client = connect(server.url)
        serve(client, "m")
        file_id = put(store_of(client, tmp_path), lines_of(LINES))
        plane = ControlPlane(server.url, ["--file-store", str(store)])
        batches = [
            submit_file(client, tmp_path, file_id, seconds=8.0 if number % 4 == 0 else 600.0).id for number in range(12)
        ]
        cancel_batch(client, batches[1])  # one at least in time
        plane.start()
        reader = BatchReader(connect(server.url), batches)
        reader.start()
        until = time.monotonic() + 10
        while time.monotonic() < until or (reader.looks <= 100 and reader.is_alive()):
            name = rng.choice(["driver", "twin", "ticker", "driver", "twin"])
            plane.kill(name)
            plane.start(name)
            if rng.random() < 0.4:
                cancel_batch(client, rng.choice(batches[1::2]))
            reader.stopping.wait(rng.uniform(0.05, 0.8))
        wait_until(lambda: all(get_batch(client, batch).ended for batch in batches), 120, "all batches end")
        wait_until(
            lambda: not Queue(client).open_batches(""), 60, "what a kill left at a batch's end to be cleared away"
        )
        reader.stopping.set()
        reader.join()
        plane.stop()
        assert (reader.found, reader.error) == ([], None), seed
        assert reader.looks > 100
        for batch in batches:
            check(client, tmp_path, get_batch(client, batch), seed)
        assert {get_batch(client, batch).state for batch in batches} >= {"completed", "cancelled"}, seed
        assert faults(client) == []
        client.close()


def check(client: redis.Redis, folder: Path, record: BatchRecord, seed: int) -> None:
    """Every line in one of the two files, once; the log holds what the output holds."""
    good, bad = (
        content_of(client, folder, file_id).splitlines() for file_id in (record.output_file_id, record.error_file_id)
    )
    assert (len(good), len(bad)) == (record.completed, record.failed), (seed, record.id)
    assert record.completed + record.failed == record.total, (seed, record.id)
    if record.total:
        names = [json.loads(line)["custom_id"] for line in good + bad]
        assert sorted(names) == sorted(f"c{number}" for number in range(1, LINES + 1)), (seed, record.id)
    assert sorted(log_of(record).splitlines()) == sorted(good), (seed, record.id)
