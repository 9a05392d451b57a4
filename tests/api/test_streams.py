"""Following a request by its id, and going on after a cut."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
import redis

from jobs.protocol.completions import COMPLETIONS
from jobs.protocol.requests import Request, RequestKey, new_live_id
from jobs.queue.request_queue import Queue
from tests.api.scripted_worker import MODEL, ScriptedWorker
from tests.support.stream_client import StreamAnswer
from tests.support.waiting import wait_until

PIECES = ["one ", "two ", "three ", "four"]


def test_a_cut_reader_goes_on_after_the_last_event_it_saw(
    http: httpx.Client, client: openai.OpenAI, scripted: Callable[..., ScriptedWorker]
) -> None:
    worker = scripted(lambda claim: PIECES)
    worker.step = threading.Semaphore(2)
    call = threading.Thread(target=lambda: list(client.completions.create(model=MODEL, prompt="x", stream=True)))
    call.start()
    wait_until(lambda: worker.claims, 60, "the call to be claimed")
    path = f"/v1/streams/{worker.claims[0].key.batch}"
    seen, last_id = [], ""
    with http.stream("GET", path) as answer:
        for event_id, event in _events(answer.iter_lines()):
            seen.append(_text(event))
            last_id = event_id
            if len("".join(seen)) == len("one two "):
                break
    worker.step.release(2)
    call.join()
    rest = http.get(path, headers={"last-event-id": last_id})
    events = list(_events(iter(rest.text.splitlines())))
    assert "".join(seen) + "".join(_text(event) for _, event in events) == "".join(PIECES)
    assert events[-1][1]["status"] == 200
    assert events[-1][1]["response"]["choices"][0]["text"] == "".join(PIECES)
    assert rest.text.rstrip().endswith("data: [DONE]")


def test_many_who_follow_delay_no_call_and_miss_nothing(
    api_url: str,
    client: openai.OpenAI,
    redis_client: redis.Redis,
    queue: Queue,
    scripted: Callable[..., ScriptedWorker],
) -> None:
    """More than there are connections to Redis for all else; theirs end with them."""
    waiting = RequestKey(new_live_id(""), 0)
    body = json.dumps({"model": "later", "prompt": "x", "stream": True}).encode()
    queue.submit(waiting.batch, Request(COMPLETIONS, "later", body, seed=0))

    async def follow() -> list[Any]:
        async with StreamAnswer(api_url, f"/v1/streams/{waiting.batch}") as answer:
            await answer.begin()
            began.append(answer.status)
            return [event.value async for event in answer.events()]

    async def run() -> list[list[Any]]:
        followers = [asyncio.create_task(follow()) for _ in range(300)]
        while len(began) < len(followers):
            await asyncio.sleep(0.05)
        answer = await asyncio.to_thread(client.completions.create, model=MODEL, prompt="x")
        assert answer.choices[0].text == "done"
        scripted(lambda claim: PIECES, models=("later",))
        return await asyncio.gather(*followers)

    began: list[int] = []
    scripted(lambda claim: ["done"])

    async def limited() -> list[list[Any]]:
        async with asyncio.timeout(120):
            return await run()

    before = connected_clients(redis_client)
    for values in asyncio.run(limited()):
        assert values[-1] is None
        assert values[-2]["status"] == 200
        assert "".join(_text(value) for value in values[:-1]) == "".join(PIECES)
    threads = 70  # each may keep a connection of its own
    wait_until(lambda: connected_clients(redis_client) < before + threads, 60, "connections to be closed")


def connected_clients(client: redis.Redis) -> int:
    info: Any = client.info("clients")
    return int(info["connected_clients"])


def _text(event: dict[str, Any]) -> str:
    return "".join(choice["text"] for choice in event["choices"])


def _events(lines: Iterator[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    event_id = ""
    for line in lines:
        if line.startswith("id: "):
            event_id = line[4:]
        elif line.startswith("data: {"):
            yield event_id, json.loads(line[6:])


@pytest.mark.parametrize(
    "after", ["x", "1", "1-", "-1-1", "1-1-1", "99999999999999999999-1", "1-99999999999999999999", "²-1"]
)
def test_what_is_not_the_id_of_an_event_is_refused(http: httpx.Client, queue: Queue, after: str) -> None:
    queue.submit("live_x", Request(COMPLETIONS, MODEL, b"{}", seed=0))
    answer = http.get("/v1/streams/live_x", headers={"last-event-id": after.encode("latin-1")})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Last-Event-ID")


@pytest.mark.parametrize(
    "name",
    [
        "x",
        "batch_a",
        "batch_a/",
        "/1",
        "batch_a/x",
        "batch_a/-1",
        "batch_a/1/2",
        "live_a",
        "live_a/0",
        "%00/1",
        "a/" + "9" * 5000,
    ],
)
def test_what_names_no_request_is_not_found(http: httpx.Client, queue: Queue, name: str) -> None:
    answer = http.get(f"/v1/streams/{name}")
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
