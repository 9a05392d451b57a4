"""Sixty streams at once, half of whose clients leave: whoever stays gets the whole answer, and
nothing is left of any of them.

`tests/pipeline/test_live_storm.py` is the same with a thousand, an engine, and kills.
"""

import asyncio
import gc
import json
import random
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from api.settings import ApiSettings
from jobs.protocol.requests import Claim
from jobs.queue import keys
from jobs.queue.request_queue import Queue
from jobs.queue.settings import QueueSettings
from tests.api.scripted_worker import MODEL, ScriptedWorker
from tests.support import http_calls
from tests.support.api_server import running_api
from tests.support.integrity import faults
from tests.support.storm import Storm, StormQuestion
from tests.support.waiting import wait_until

pytestmark = pytest.mark.proof

STREAMS = 64
KEPT = {"stream_keep_seconds": 1}  # of ended calls


def test_sixty_streams_of_which_half_are_left(
    redis_url: str, redis_client: redis.Redis, seed: int, tmp_path: Path
) -> None:
    rng = random.Random(seed)
    queue = Queue(redis_client, QueueSettings(**KEPT))
    settings = ApiSettings(redis_url=redis_url, file_store=str(tmp_path), **KEPT)
    held = threading.Event()
    held.set()

    def script(claim: Claim) -> Iterator[str]:
        words = json.loads(claim.request.body)["messages"][0]["content"].split(" ")[:-1]
        for word in reversed(words):
            assert held.wait(120)
            yield f"{word} "

    with ScriptedWorker(queue, script), running_api(settings) as url:
        questions = [question(rng, number) for number in range(STREAMS)]
        assert http_calls.post(f"{url}/v1/chat/completions", json=questions[0].body).status_code == 200
        held.clear()
        wait_until(lambda: not redis_client.keys(keys.tokens("*")), 30, "the first stream to be gone")
        before, kinds = tasks(), kinds_of_keys(redis_client)
        storm = Storm([url], questions, rng)
        asyncio.run(run(storm, held))
        print(storm.report())
        assert storm.faults == []
        assert storm.right == STREAMS // 2
        wait_until(lambda: http_calls.get(f"{url}/health").json().get("live_calls") == 0, 30, "no call to be left")
        wait_until(lambda: not tasks() - before, 30, "no task to be left")
        wait_until(lambda: not kinds_of_keys(redis_client) - kinds, 30, "no key to be left")
        assert faults(redis_client) == []


async def run(storm: Storm, held: threading.Event) -> None:
    """No answer goes on before every stream has begun."""
    async with asyncio.timeout(120):
        running = asyncio.create_task(storm.run())
        while not storm.is_whole and not running.done():
            await asyncio.sleep(0.01)
        held.set()
        await running


def question(rng: random.Random, number: int) -> StormQuestion:
    """Its answer is a function of its prompt."""
    words = [f"{number}-{rng.randrange(10**6)} " for _ in range(rng.randint(5, 40))]
    body = {"model": MODEL, "messages": [{"role": "user", "content": "".join(words)}]}
    return StormQuestion(body, "".join(reversed(words)), len(words))


def tasks() -> Counter[str]:
    """What runs in the event loops of this process, which are the API's."""
    found = [task for task in gc.get_objects() if type(task) is asyncio.Task]
    return Counter(str(task.get_coro()).split(" at ")[0] for task in found if not task.done())


def kinds_of_keys(client: redis.Redis) -> set[str]:
    return {":".join(name.decode().split(":")[:2]) for name in client.scan_iter("*")}
