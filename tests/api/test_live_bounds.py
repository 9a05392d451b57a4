"""What live calls may take: how many there may be, how much of Redis they and their answers use,
and how long one outlasts its client.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import redis

from api.settings import ApiSettings
from jobs.protocol.requests import Claim, RequestKey, new_live_id
from jobs.queue import keys
from jobs.queue.registry import WorkerRecord
from jobs.queue.request_queue import Queue
from jobs.store.api_keys import create_key
from tests.api.scripted_worker import MODEL, ScriptedWorker
from tests.support import http_calls
from tests.support.api_server import official_client, plain_client, running_api
from tests.support.commands import RunningCommand, running_pipeline
from tests.support.integrity import faults
from tests.support.ports import reserved_port
from tests.support.requests import finished, request
from tests.support.waiting import wait_until

MIB = 1024 * 1024
Scripted = Callable[..., ScriptedWorker]


@pytest.fixture
def busy_worker(queue: Queue) -> Iterator[str]:
    """A worker that is ready and takes nothing."""
    queue.register_worker(WorkerRecord("busy", [MODEL], "ready", 128, 1.0, "host", 1))
    yield "busy"
    queue.remove_worker("busy")


def waiting(client: redis.Redis) -> int:
    return int(client.hlen(keys.LIVE_CALLS))  # type: ignore[arg-type]


def post(url: str, size: int = 1, **body: Any) -> httpx.Response:
    with plain_client(url) as http:  # it waits for longer than any test for it
        return http.post("/v1/completions", json={"model": MODEL, "prompt": "x" * size, **body}, timeout=300)


@contextmanager
def calls(url: str, count: int, size: int, accepted: list[httpx.Response]) -> Iterator[ThreadPoolExecutor]:
    """Calls from threads; answers are added to `accepted`."""
    with ThreadPoolExecutor(count) as pool:
        for _ in range(count):
            pool.submit(lambda: accepted.append(post(url, size)))
        yield pool


@pytest.mark.parametrize(
    ("limit", "code", "kind"),
    [
        ("live_calls_per_tenant", "rate_limit_exceeded", "rate_limit_error"),
        ("live_bytes_per_tenant", "rate_limit_exceeded", "rate_limit_error"),
        ("live_calls_per_model", "engine_overloaded", "server_error"),
        ("live_bytes_per_model", "engine_overloaded", "server_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_one_call_too_many_is_answered_429(
    redis_url: str, redis_client: redis.Redis, queue: Queue, busy_worker: str, limit: str, code: str, kind: str,
    stream: bool,
) -> None:  # fmt: skip
    answers: list[httpx.Response] = []
    with running_api(ApiSettings(redis_url=redis_url, **{limit: 1})) as url, calls(url, 1, 1, answers):
        wait_until(lambda: waiting(redis_client) == 1, 60, "the first call to wait")
        with pytest.raises(openai.RateLimitError) as caught, official_client(url) as client:
            client.completions.create(model=MODEL, prompt="x", stream=stream)
        assert (caught.value.code, caught.value.type) == (code, kind)
        assert int(caught.value.response.headers["retry-after"]) > 0
        [claim] = queue.claim(busy_worker, 1, 9, models=[MODEL])
        queue.commit(busy_worker, [finished(claim)])
        wait_until(lambda: answers, 60, "the first call's answer")
        assert answers[0].status_code == 200
        assert waiting(redis_client) == 0
    assert faults(redis_client) == []


def test_a_call_that_redis_lost_and_has_no_room_for_is_answered_429(
    redis_url: str, redis_client: redis.Redis, queue: Queue, busy_worker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.live_call._SILENCE_SECONDS", 0.05)
    answers: list[httpx.Response] = []
    with running_api(ApiSettings(redis_url=redis_url, live_calls_per_tenant=1)) as url, calls(url, 1, 1, answers):
        wait_until(lambda: waiting(redis_client) == 1, 60, "the call to wait")
        [name] = redis_client.hkeys(keys.LIVE_CALLS)
        other = RequestKey(new_live_id(""), 0)
        queue.submit(other.batch, request(MODEL))
        queue.cancel([RequestKey.parse(name)])
        wait_until(lambda: answers, 60, "the answer")
        assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert http_calls.get(f"{url}/health").json().get("live_calls") == 0


@pytest.mark.parametrize(
    ("count", "limit"),
    [
        pytest.param(24, {"live_bytes_per_tenant": 8 * MIB}, id="few"),
        pytest.param(300, {}, id="many", marks=pytest.mark.proof),
    ],
)
def test_waiting_calls_take_no_more_of_redis_than_they_may(
    redis_url: str, redis_client: redis.Redis, queue: Queue, busy_worker: str, count: int, limit: dict[str, int]
) -> None:
    """Bodies of 1 MiB. Those that were admitted are answered then."""
    before, answers = used_memory(redis_client), []
    settings = ApiSettings(redis_url=redis_url, **limit)
    most = settings.live_bytes_per_tenant // MIB
    with running_api(settings) as url, calls(url, count, MIB, answers) as pool:
        wait_until(lambda: len(answers) + waiting(redis_client) == count, 120, "all calls to wait or be refused")
        assert waiting(redis_client) == most - 1  # a body is a little more than its prompt
        # A string takes up to a quarter more than its length; buffers of clients shrink later
        bound = 1.25 * settings.live_bytes_per_tenant + 4 * MIB
        wait_until(lambda: used_memory(redis_client) - before < bound, 60, "Redis to hold admitted calls alone")
        print(f"{count} calls of 1 MiB: Redis grew by {(used_memory(redis_client) - before) / MIB:.1f} MiB")
        assert {answer.status_code for answer in answers} == {429}
        for seq in range(1, count):
            claims = queue.claim(busy_worker, seq, 500, models=[MODEL])
            assert sum(len(claim.request.body) for claim in claims) < 18 * MIB
            queue.commit(busy_worker, [finished(claim) for claim in claims])
            if not claims:
                break
        pool.shutdown()
    assert [answer.status_code for answer in answers].count(200) == most - 1
    assert faults(redis_client) == []


def used_memory(client: redis.Redis) -> int:
    info: Any = client.info("memory")
    return int(info["used_memory"])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_large_answer_arrives_and_is_stored_once(
    client: openai.OpenAI, redis_client: redis.Redis, scripted: Scripted, stream: bool
) -> None:
    """Also one whose pieces alone are too large to be stored twice."""
    pieces = ["a" * 8000, "b", "c" * 8000, "d" * 8000, "e"]
    worker = scripted(lambda claim: pieces)
    largest = 0

    def note_size(*_: object) -> None:
        nonlocal largest
        for name in redis_client.scan_iter("{q}:api:*"):
            entries: Any = redis_client.xrange(name)
            sizes = [sum(map(len, fields.values())) for _, fields in entries]
            largest = max(largest, *sizes, 0)

    worker.step = threading.Semaphore(0)
    noting = threading.Thread(target=lambda: [(note_size(), worker.step.release()) for _ in pieces])
    noting.start()
    answer: Any = client.completions.create(model=MODEL, prompt="x", stream=stream)
    text = "".join(chunk.choices[0].text for chunk in answer) if stream else answer.choices[0].text
    noting.join()
    note_size()
    assert text == "".join(pieces)
    assert 0 < largest < 4500


@pytest.mark.parametrize("count", [40, pytest.param(600, marks=pytest.mark.proof)])
def test_answers_that_were_given_are_not_kept(
    http: httpx.Client, redis_client: redis.Redis, scripted: Scripted, count: int
) -> None:
    """Answers of 50 kB to calls that do not stream, whose clients cannot ask for them again."""
    scripted(lambda claim: ["x" * 50_000])
    before, most = used_memory(redis_client), 0
    for _ in range(count):
        answer = http.post("/v1/completions", json={"model": MODEL, "prompt": "x"})
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["choices"][0]["text"]) == 50_000
        most = max(most, used_memory(redis_client) - before)
    print(f"{count} answers of 50 kB: Redis grew by up to {most / MIB:.1f} MiB")
    wait_until(lambda: not redis_client.keys(keys.tokens("*")), 60, "streams to be removed")
    assert used_memory(redis_client) - before < 2 * MIB


@pytest.mark.proof
def test_a_call_is_not_behind_a_thousand_of_another_tenant(
    redis_url: str, redis_client: redis.Redis, queue: Queue, busy_worker: str, tmp_path: Path
) -> None:
    """The thousand come over HTTP too."""
    secrets = [create_key(str(tmp_path), tenant=tenant)[1] for tenant in ("greedy", "modest")]

    async def call(http: httpx.AsyncClient, secret: str) -> int:
        headers = {"authorization": f"Bearer {secret}"}
        return (await http.post("/v1/completions", json={"model": MODEL, "prompt": "x"}, headers=headers)).status_code

    async def run(url: str) -> list[int]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as http:
            greedy = [asyncio.create_task(call(http, secrets[0])) for _ in range(1000)]
            await reach(1000)
            served = queue.claim(busy_worker, 1, 4, models=[MODEL])
            modest = asyncio.create_task(call(http, secrets[1]))
            await reach(1001)
            served += queue.claim(busy_worker, 2, 4, models=[MODEL])
            before = {claim.key.batch[:17] for claim in served[:4]}
            assert len(before) == 1
            assert any(claim.key.batch[:17] not in before for claim in served[4:])
            for seq in range(3, 9):
                queue.commit(busy_worker, [finished(claim) for claim in served])
                served = queue.claim(busy_worker, seq, 500, models=[MODEL])
            return [await modest, *await asyncio.gather(*greedy)]

    async def reach(count: int) -> None:
        async with asyncio.timeout(240):
            while waiting(redis_client) < count:
                queue.renew(busy_worker, [])
                await asyncio.sleep(0.05)

    with running_api_process(redis_url, tmp_path) as (url, _):
        assert asyncio.run(run(url)) == [200] * 1001
    assert faults(redis_client) == []


@contextmanager
def running_api_process(redis_url: str, store: Path) -> Iterator[tuple[str, RunningCommand]]:
    with (
        reserved_port() as port,
        running_pipeline("api", "--port", port, "--file-store", store, redis_url=redis_url) as command,
    ):
        command.wait_for("listening")
        yield f"http://127.0.0.1:{port}", command


def test_a_call_outlasts_a_full_redis(
    redis_url: str, redis_client: redis.Redis, queue: Queue, busy_worker: str
) -> None:
    """Its API process goes on to say that it is alive, and to read."""
    answers: list[httpx.Response] = []
    with running_api(ApiSettings(redis_url=redis_url, redis_retry_seconds=0.1)) as url, calls(url, 1, 1, answers):
        wait_until(lambda: waiting(redis_client) == 1, 60, "the call to wait")
        [alive] = redis_client.keys(keys.api_alive("*"))
        redis_client.config_set("maxmemory", 1)
        try:
            for _ in range(2):
                redis_client.expire(alive, 20)
                wait_until(lambda: redis_client.ttl(alive) > 30, 60, "the process to say that it is alive")
        finally:
            redis_client.config_set("maxmemory", 0)
        [claim] = queue.claim(busy_worker, 1, 9, models=[MODEL])
        queue.commit(busy_worker, [finished(claim)])
        wait_until(lambda: answers, 60, "the answer")
    assert answers[0].status_code == 200


@pytest.mark.parametrize("others", ["calls", "readers"])
def test_answers_arrive_while_redis_is_full(
    redis_url: str, redis_client: redis.Redis, queue: Queue, busy_worker: str, others: str
) -> None:
    """However many others there are that Redis has no room for; calls of them are refused."""
    answers: list[httpx.Response] = []
    settings = ApiSettings(redis_url=redis_url, redis_retry_seconds=600)
    with running_api(settings) as url, calls(url, 1, 1, answers), ThreadPoolExecutor(40) as pool:
        wait_until(lambda: waiting(redis_client) == 1, 60, "the call to wait")
        [claim] = queue.claim(busy_worker, 1, 9, models=[MODEL])
        redis_client.config_resetstat()
        redis_client.config_set("maxmemory", 1)
        try:
            asked = [pool.submit(post, url) if others == "calls" else pool.submit(read, url, claim) for _ in range(40)]
            wait_until(lambda: out_of_memory(redis_client) >= 40, 60, "Redis to refuse")
            queue.commit(busy_worker, [finished(claim, "y" * 10_000)])
            wait_until(lambda: answers, 60, "the answer")
            if others == "calls":
                refused = [call.result() for call in asked]
                assert {(one.status_code, one.json()["error"]["code"]) for one in refused} == {
                    (503, "queue_unavailable")
                }
        finally:
            redis_client.config_set("maxmemory", 0)
    assert answers[0].status_code == 200


def out_of_memory(client: redis.Redis) -> int:
    errors: Any = client.info("errorstats")
    return int(errors.get("errorstat_OOM", {"count": 0})["count"])


def read(url: str, claim: Claim) -> httpx.Response:
    with plain_client(url) as http:
        return http.get(f"/v1/streams/{claim.key.batch}")


@pytest.mark.proof
def test_a_call_ends_with_its_api_process(
    redis_url: str, redis_client: redis.Redis, queue: Queue, busy_worker: str, tmp_path: Path
) -> None:
    with running_api_process(redis_url, tmp_path) as (url, command):
        failures: list[Exception] = []

        def call() -> None:
            try:
                post(url)
            except httpx.TransportError as error:
                failures.append(error)

        threads = [threading.Thread(target=call) for _ in range(2)]
        for thread in threads:
            thread.start()
        wait_until(lambda: waiting(redis_client) == 2, 60, "both calls to wait")
        [running] = queue.claim(busy_worker, 1, 1, models=[MODEL])
        [alive] = redis_client.keys(keys.api_alive("*"))
        redis_client.expire(alive, 20)
        wait_until(lambda: redis_client.ttl(alive) > 30, 60, "the process to say again that it is alive")
        command.process.kill()
        for thread in threads:
            thread.join(60)
        assert len(failures) == 2
    redis_client.delete(alive)  # as after a minute
    assert queue.claim(busy_worker, 2, 9, models=[MODEL]) == []
    assert waiting(redis_client) == 1
    queue.reap()
    redis_client.hset(keys.TICK, "reap_after", 0)
    queue.reap()
    assert queue.renew(busy_worker, [(running.key, running.fence)]) == [running.key]
    assert waiting(redis_client) == 0
    assert redis_client.keys(keys.bodies("*")) == redis_client.keys(keys.tokens("*")) == []
    assert faults(redis_client) == []
