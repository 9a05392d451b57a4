"""A worker whose slots the live calls of one tenant hold, when others come."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.protocol.requests import Request, StreamEntry
from jobs.queue import keys
from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue
from jobs.queue.settings import QueueSettings
from tests.support.poison import Poison, poisoned_environment
from tests.support.redis_server import running_server
from tests.support.requests import token_ids_in
from tests.support.worker_process import running_worker
from tests.workers.test_worker import CHAT, follow, slow

SLOTS, TOKENS = 4, 50
GREEDY, MODEST = ("live_" + letter * 12 for letter in "gm")
_numbers = itertools.count()


@pytest.fixture(scope="module")
def queue() -> Iterator[Queue]:
    """One worker serves it, at 50 ms a step."""
    with tempfile.TemporaryDirectory() as folder, running_server(Path(folder)) as server:
        queue = Queue(connect(server.url), QueueSettings(lease_seconds=30.0))
        flags = ("--lease-seconds", "30", "--max-num-seqs", str(SLOTS))
        with running_worker(queue, server.url, *flags, **poisoned_environment(Poison("tortoise", "slow"))):
            yield queue


def submit(queue: Queue, tenant: str, tokens: int, choices: int = 1) -> str:
    """Return the API process that gets the answer."""
    number = next(_numbers)
    body = json.dumps(slow(tokens, n=choices)).encode()
    queue.submit(f"{tenant}{number}", Request(CHAT, "demo", body, seed=1, reply_to=f"api_{number}"))
    return f"api_{number}"


def tokens_of(entries: list[StreamEntry], choices: int) -> list[list[int]]:
    """The tokens of each choice; the stream has no gap and ends well."""
    assert entries[-1].result is not None
    assert entries[-1].result.status == 200
    found: list[list[int]] = [[] for _ in range(choices)]
    for entry in entries:
        for chunk in entry.chunks:
            assert chunk.index == len(found[chunk.choice])
            found[chunk.choice] += chunk.token_ids
    return found


@pytest.mark.proof
@pytest.mark.parametrize(
    ("tenant", "calls", "choices"),
    [
        (MODEST, 5 * SLOTS, 1),
        (MODEST, 1, SLOTS),
        (MODEST, 3, 5 * SLOTS),
        (GREEDY, 1, 5 * SLOTS),  # a call of the same tenant
    ],
)
def test_a_call_of_a_few_tokens_is_answered_before_any_of_those_that_hold_the_slots(
    queue: Queue, tenant: str, calls: int, choices: int
) -> None:
    before = [submit(queue, GREEDY, TOKENS, choices) for _ in range(calls)]
    begun = follow(queue, before[0], until=3)
    assert any(token_ids_in(entry) for entry in begun)
    tokens_of(follow(queue, submit(queue, tenant, 4)), 1)
    assert queue.redis.hlen(keys.LIVE_CALLS) == calls
    answers = [tokens for api in before for tokens in tokens_of(follow(queue, api), choices)]
    assert {len(tokens) for tokens in answers} == {TOKENS}
    assert len(set(map(tuple, answers))) == 1
