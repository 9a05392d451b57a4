"""A batch to follow: made over HTTP, its jobs run step by step, its lines answered piece by
piece.
"""

import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import openai
import redis

from jobs.protocol.requests import Claim
from jobs.queue.registry import WorkerRecord
from jobs.queue.request_queue import Queue
from tests.api.scripted_worker import MODEL
from tests.support.batch_steps import step
from tests.support.control_plane import write_input
from tests.support.event_reader import Event
from tests.support.waiting import wait_until

PIECES = ["one ", "two ", "three ", "four"]
LINES = 3
WHOLE = {f"c{number}": "".join(PIECES) for number in range(1, LINES + 1)}
COMPLETED = [(f"c{number}", "completed") for number in range(1, LINES + 1)]


class FollowedBatch:
    """A batch of `LINES` lines, made over HTTP, whose control plane runs step by step here."""

    def __init__(self, client: redis.Redis, api_url: str, folder: Path, key: str = "none") -> None:
        self.client = client
        Queue(client).register_worker(WorkerRecord("known", [MODEL], "ready", 128, time.time(), "host", 1))
        source = write_input(folder / "in.jsonl", LINES, model=MODEL)
        with openai.OpenAI(base_url=f"{api_url}/v1", api_key=key, max_retries=0) as official:
            file = official.files.create(file=source, purpose="batch")
            self.id = official.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
            ).id
        self.path = f"/v1/batches/{self.id}/stream"

    def start(self) -> None:
        """Its lines are ready."""
        assert step(self.client, self.id).state == "in_progress"
        step(self.client, self.id)

    def finish(self) -> None:
        """To its end."""
        wait_until(lambda: step(self.client, self.id).ended, 60, "the batch to end")


class Steps:
    """Give every line its next piece only on demand."""

    def __init__(self) -> None:
        self._gates = {line: threading.Semaphore(0) for line in range(1, LINES + 1)}
        self.closed = False

    def script(self, claim: Claim) -> Iterator[str]:
        """For a `ScriptedWorker`."""
        for piece in PIECES:
            while not self._gates[claim.key.line].acquire(timeout=0.02):
                if self.closed:
                    return
            yield piece

    def go_on(self, pieces: int) -> None:
        """So many pieces for each line."""
        for gate in self._gates.values():
            gate.release(pieces)


def ends(events: Iterable[Event]) -> list[tuple[str, str]]:
    """Which lines ended, and how."""
    return sorted(
        (value["custom_id"], value["status"])
        for _, value in events
        if value and value.get("status") and "custom_id" in value
    )
