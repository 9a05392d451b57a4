"""Answers as large as a call of many texts may give: above the cap of undrained results a batch
waits for its drain and no longer, and a drain holds no more than some of them.
"""

import base64
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import redis

from jobs.batch.client import get_batch
from jobs.control import advance
from jobs.protocol.pooling_parameters import EMBEDDINGS
from jobs.protocol.requests import Claim, Finished
from jobs.protocol.results import Result, Usage, encode_json
from jobs.queue.registry import WorkerRecord
from jobs.queue.request_queue import Queue
from jobs.queue.settings import QueueSettings
from tests.support.batch_steps import answer_all, begin, run_to_end, step
from tests.support.control_plane import control_plane, read_jsonl
from tests.support.store_batches import check_every_line_once, lines_of, submit
from tests.support.waiting import wait_until

LINES = 40
CAP = 1 << 20
ANSWER_BYTES = 800_000
AT_ONCE = 4


def vectors(claim: Claim) -> Result:
    """The line's number, as often as it takes to fill the bytes."""
    packed = struct.pack("<f", claim.key.line) * (ANSWER_BYTES * 3 // 16)
    data = [{"object": "embedding", "index": 0, "embedding": base64.b64encode(packed).decode()}]
    return Result(200, encode_json({"object": "list", "data": data, "model": "m"}), Usage(3), f"req_{claim.key.line}")


def embedding_lines(count: int) -> bytes:
    body = {"model": "m", "input": "x", "encoding_format": "base64"}
    lines = ({"custom_id": f"c{n}", "method": "POST", "url": EMBEDDINGS, "body": body} for n in range(1, count + 1))
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def test_answers_above_the_cap_wait_for_a_drain_and_the_batch_goes_on(
    redis_client: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(embedding_lines(LINES))
    queue, largest = Queue(redis_client, QueueSettings(undrained_bytes=CAP)), 0
    queue.register_worker(WorkerRecord("w", ["m"], "ready", 4096, 1.0, "test", 1, tasks=("embed", "tokenize")))
    seq = iter(range(1, 1 << 30))
    with control_plane(redis_url, environment={"UNDRAINED_BYTES": str(CAP)}):
        batch = begin(redis_client, source).id

        def work() -> bool:
            nonlocal largest
            before = queue.batch_fields(batch).result_bytes
            claims = queue.claim("w", next(seq), AT_ONCE, models=["m"])
            assert not claims or before <= CAP or queue.batch_fields(batch).result_bytes < before
            queue.commit("w", [Finished(claim.key, claim.fence, vectors(claim)) for claim in claims])
            largest = max(largest, queue.batch_fields(batch).result_bytes)
            return get_batch(redis_client, batch).ended

        wait_until(work, 120, "the batch to end")
    assert CAP < largest <= CAP + AT_ONCE * (ANSWER_BYTES + 10_000)
    rows = read_jsonl(tmp_path / "out.jsonl")
    assert [row["custom_id"] for row in rows] == [f"c{number}" for number in range(1, LINES + 1)]
    for number, row in enumerate(rows, 1):
        decoded = base64.b64decode(row["response"]["body"]["data"][0]["embedding"])
        assert decoded[:4] == decoded[-4:] == struct.pack("<f", number)


@pytest.fixture
def part_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many results each part got; some 10 KB of them are a part."""
    sizes: list[int] = []
    write_part = advance.write_part

    def noted(root: str, name: str, results: Any) -> Any:
        sizes.append(len(results))
        return write_part(root, name, results)

    monkeypatch.setattr(advance, "write_part", noted)
    monkeypatch.setattr(advance, "_MOST_DRAINED_BYTES", 10_000)
    return sizes


def test_what_piled_up_is_drained_some_at_a_time(
    redis_client: redis.Redis, tmp_path: Path, part_sizes: list[int]
) -> None:
    """Also where all lines are done by then, and one drain would otherwise have them all."""
    batch = submit(redis_client, tmp_path, lines_of(100, user="x" * 1000)).id
    step(redis_client, batch)
    step(redis_client, batch)
    assert answer_all(redis_client) == 100
    record = run_to_end(redis_client, batch)
    assert (sum(part_sizes), len(part_sizes) > 3, max(part_sizes) < 50) == (100, True, True), part_sizes
    check_every_line_once(redis_client, tmp_path, record, 100)


def test_a_result_that_is_larger_than_a_part_may_be_has_its_own(
    redis_client: redis.Redis, tmp_path: Path, part_sizes: list[int]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(embedding_lines(5))
    record = run_to_end(redis_client, begin(redis_client, source).id, vectors)
    assert (record.completed, part_sizes) == (5, [1] * 5)
