"""Many batches at once, cancelled and expiring at moments of chance, read while they run: each line
ends once, and all views agree.
"""

import json
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import openai
import pytest
from openai.types import Batch

from tests.contract.calls import results, submit
from tests.contract.conftest import SHORT_WINDOW
from tests.contract.shapes import ENDED, Recorder
from tests.contract.test_schemathesis import SEED
from tests.support.api_server import official_client
from tests.support.batch_stack import AWAY, BatchStack
from tests.support.control_plane import chat_line

BATCHES = 60


@pytest.mark.proof
@pytest.mark.timeout(900)
def test_every_line_ends_once_whatever_becomes_of_its_batch(stack: BatchStack) -> None:
    """The same batches each time; API_SEED=n makes others."""
    seed = int(os.environ.get("API_SEED", SEED))
    print(f"seed {seed}")
    with ThreadPoolExecutor(8) as clients:
        faults = [*clients.map(lambda number: one_batch(stack, random.Random(seed + number)), range(BATCHES))]
    assert [fault for fault in faults if fault] == []


def one_batch(stack: BatchStack, chance: random.Random) -> list[str]:
    """What is wrong with the story of one batch; some lines wait for a worker that never comes."""
    ids = [f"id{number}" for number in range(chance.choice([1, 5, 50, 300]))]
    waits = chance.random() < 0.4
    models = ["m", "m", "m", AWAY] if waits else ["m"]
    content = b"".join(chat_line(name, chance.choice(["hi", "hi", "fail 400"]), chance.choice(models)) for name in ids)
    window = SHORT_WINDOW if waits or chance.random() < 0.3 else "24h"
    with official_client(stack.api_url, on_answer=(recorder := Recorder())) as client:
        batch = submit(client, content, completion_window=window)
        batch, early = follow(client, batch, chance)
        output = [line["custom_id"] for line in results(client, batch.output_file_id)] if batch.output_file_id else []
        errors = [line["custom_id"] for line in results(client, batch.error_file_id)] if batch.error_file_id else []
        if batch.output_file_id:
            early += read_on(client, batch.output_file_id, len(early), 100_000)
    counts = batch.request_counts
    found = list(recorder.faults)
    if counts is None or (counts.completed, counts.failed) != (len(output), len(errors)):
        found.append(f"{batch.id}: {counts}, but {len(output)} lines and {len(errors)} errors")
    if sorted(output + errors) != sorted(ids) and batch.in_progress_at is not None:
        found.append(f"{batch.id}: {len(ids)} lines ended as {len(output)} and {len(errors)}")
    if sorted(early) != sorted(output):
        found.append(f"{batch.id}: {len(early)} lines were read early of {len(output)}")
    return found


def follow(client: openai.OpenAI, batch: Batch, chance: random.Random) -> tuple[Batch, list[str]]:
    """The batch at its end, and what could be read of its output until then; every other one is
    cancelled on the way.
    """
    cancel_at = time.monotonic() + 2.5 * chance.random() if chance.random() < 0.5 else float("inf")
    early: list[str] = []
    while batch.status not in ENDED:
        if time.monotonic() > cancel_at:
            cancel_at = float("inf")
            with suppress(openai.ConflictError):
                client.batches.cancel(batch.id)
        batch = client.batches.retrieve(batch.id)
        if batch.output_file_id:
            early += read_on(client, batch.output_file_id, len(early), chance.choice([1, 7, 1000]))
    return batch, early


def read_on(client: openai.OpenAI, file_id: str, offset: int, limit: int) -> list[str]:
    """The custom_ids of the lines that were finished after `offset` others."""
    answer = client.files.with_raw_response.content(file_id, extra_query={"offset": offset, "limit": limit})
    found = [json.loads(line)["custom_id"] for line in answer.content.splitlines()]
    assert int(answer.headers["x-last-line"]) == offset + len(found)
    return found
