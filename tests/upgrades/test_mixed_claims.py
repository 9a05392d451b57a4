"""Claims by scripts of the last version and of this one by turns: no line is taken twice or left,
and each keeps to priorities and risks.
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
# Takes lines for as long as it is asked to, and gives every third back before the next ones
_WORKER = """
import json, sys
from jobs.protocol.requests import Finished
from jobs.protocol.results import Result, Usage
from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue
queue, given_back = Queue(connect(sys.argv[1])), []
for seq, line in enumerate(sys.stdin, 1):
    queue.requeue("old", [(claim.key, claim.fence) for claim in given_back])
    claims = queue.claim("old", seq, int(line), models=["m"])
    given_back = claims[1::3]
    kept = [claim for claim in claims if claim not in given_back]
    result = Result(200, b"{}", Usage(10, 20, 0), "req_1")
    queue.commit("old", [Finished(claim.key, claim.fence, result, None) for claim in kept])
    print(json.dumps([claim.key.batch for claim in kept]), flush=True)
"""


class OldWorker:
    """A process of the last version, which ends at once what it claims."""

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
        queue.note_risks({"batch_3": "urgent" if urgent else ""})
        first_of = {"batch_1": "batch_0", "batch_2" if urgent else "batch_3": "batch_3" if urgent else "batch_2"}
        taken = old.take(12)
        check_order(queue, taken, first_of)
        claims = queue.claim("new", seq, 12, models=[MODEL])
        check_order(queue, [claim.key.batch for claim in claims], first_of)
        queue.requeue("new", [(claim.key, claim.fence) for claim in claims[1::4]])
        kept = [claim for claim in claims if claim not in claims[1::4]]
        queue.commit("new", [finished(claim) for claim in kept])
        done.update([*taken, *(claim.key.batch for claim in kept)])
        assert faults(redis_client) == []
        if not claims and not taken:
            break
    old.stop()
    assert done == Counter({f"batch_{number}": LINES for number in range(4)})


def check_order(queue: Queue, taken: list[str], first_of: dict[str, str]) -> None:
    """Check that nothing was taken of a batch while lines waited of the one that goes before."""
    for batch in set(taken) & first_of.keys():
        assert not ready_length(queue, first_of[batch])
