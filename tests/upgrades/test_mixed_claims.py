"""Workers of the version before beside this one: they know no weights, priorities and risks, and
take no line twice and leave none.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import redis

from jobs.queue.request_queue import Queue
from tests.support.integrity import faults
from tests.support.requests import MODEL, finished, ready_length, request
from tests.upgrades.versions import code_of, unpack_previous

pytestmark = pytest.mark.proof

LINES = 400
# Takes lines for as long as it is asked to, and gives every third back
_WORKER = """
import json, sys
from jobs.connection import connect
from jobs.queue import Queue
from jobs.requests import Finished
from jobs.results import Result, Usage
queue = Queue(connect(sys.argv[1]))
for seq, line in enumerate(sys.stdin, 1):
    claims = queue.claim("old", seq, int(line), models=["m"])
    queue.hand_back("old", [(claim.key, claim.fence) for claim in claims[1::3]])
    kept = [claim for claim in claims if claim not in claims[1::3]]
    result = Result(200, b"{}", Usage(10, 20, 0), "req_1")
    queue.commit("old", [Finished(claim.key, claim.fence, result, None) for claim in kept])
    print(json.dumps([claim.key.batch for claim in kept]), flush=True)
"""


class OldWorker:
    """A process of the version before, which ends at once what it claims."""

    def __init__(self, url: str, tree: Path) -> None:
        environment = {**os.environ, **code_of(tree)}
        command = [sys.executable, "-c", _WORKER, url]
        self._process = subprocess.Popen(
            command, env=environment, cwd=tree, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def take(self, limit: int) -> list[str]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{limit}\n")
        self._process.stdin.flush()
        taken: list[str] = json.loads(self._process.stdout.readline())
        return taken

    def stop(self) -> None:
        self._process.communicate(timeout=60)
        assert self._process.returncode == 0


def test_each_line_is_taken_once_and_first_ones_stay_first(
    redis_client: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    queue, old = Queue(redis_client), OldWorker(redis_url, unpack_previous(tmp_path))
    queue.set_weights({"heavy": 2.0})
    for number, (tenant, priority) in enumerate([("heavy", 0), ("heavy", 3), ("light", -2), ("light", 0)]):
        fields = {"priority": priority, "timestamps": {"expires": 2e9 + number}}
        queue.create_batch(f"batch_{number}", LINES, tenant=tenant, state="in_progress", fields=fields)
        queue.ingest(f"batch_{number}", [(line, request()) for line in range(LINES)], 0, LINES)
    done: Counter[str] = Counter()
    for seq in range(1, 1000):
        urgent = seq % 20 < 10
        taken = old.take(12)
        # The ticker notes them every few seconds, and thereby puts wrong places right
        queue.note_risks({f"batch_{number}": "urgent" if urgent and number == 3 else "" for number in range(4)})
        claims = queue.claim("new", seq, 12, models=[MODEL])
        batches = {claim.key.batch for claim in claims}
        light = ("batch_3", "batch_2") if urgent else ("batch_2", "batch_3")
        for first, second in (("batch_0", "batch_1"), light):
            assert second not in batches or not ready_length(queue, first), "risks and priorities"
        queue.requeue("new", [(claim.key, claim.fence) for claim in claims[1::4]])
        kept = [claim for claim in claims if claim not in claims[1::4]]
        queue.commit("new", [finished(claim) for claim in kept])
        done.update([*taken, *(claim.key.batch for claim in kept)])
        assert faults(redis_client) == []
        if not claims and not taken:
            break
    old.stop()
    assert done == Counter({f"batch_{number}": LINES for number in range(4)})
