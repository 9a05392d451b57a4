"""What is served, and whether the process can work."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import redis

from api.fleet import Fleet
from api.settings import ApiSettings
from jobs.queue import keys
from jobs.queue.registry import WorkerRecord, WorkerState
from jobs.queue.request_queue import Queue
from tests.api.scripted_worker import MODEL, ScriptedWorker
from tests.support.api_server import official_client, plain_client, running_api
from tests.support.waiting import wait_until


def register(queue: Queue, worker: str, model: str, state: WorkerState) -> None:
    queue.register_worker(WorkerRecord(worker, [model], state, 4096, time.time(), "host", 2))


def test_models_are_those_of_workers_that_are_ready_or_load(
    client: openai.OpenAI, http: httpx.Client, queue: Queue, scripted: Callable[..., ScriptedWorker]
) -> None:
    register(queue, "first", "not-yet", "loading")
    register(queue, "second", MODEL, "initializing")  # served by another one
    scripted(lambda claim: [], models=(MODEL, "org/another"))
    listed = {model.id: model.to_dict()["status"] for model in client.models.list()}
    assert listed == {"not-yet": "loading", "org/another": "ready", MODEL: "ready"}
    assert list(listed)[-1] == "not-yet"  # `data[0]` can be called
    for name in listed:
        model = client.models.retrieve(name)
        assert (model.id, model.object) == (name, "model")
        assert model.created > 0
    assert http.get("/v1/models/absent").json()["error"]["code"] == "model_not_found"


def test_an_expected_model_is_loading_until_a_worker_serves_it(
    redis_url: str, tmp_path: Path, scripted: Callable[..., ScriptedWorker]
) -> None:
    settings = ApiSettings(redis_url=redis_url, file_store=str(tmp_path), expected_models=(MODEL,))
    with running_api(settings) as url, plain_client(url) as http:
        assert http.get(f"/v1/models/{MODEL}").json()["status"] == "loading"
        assert http.get("/ready").json() == {"status": "not ready", "reason": f"loading {MODEL}"}
        assert call(http, MODEL).json()["error"]["code"] == "model_loading"
        scripted(lambda claim: ["one"])
        assert call(http, MODEL).status_code == 200
        assert [(model["id"], model["status"]) for model in http.get("/v1/models").json()["data"]] == [(MODEL, "ready")]


@pytest.mark.proof
def test_the_official_client_waits_for_a_model_that_is_being_loaded(
    redis_url: str, tmp_path: Path, scripted: Callable[..., ScriptedWorker]
) -> None:
    statuses: list[int] = []

    def on_answer(answer: Any) -> None:
        statuses.append(answer.status_code)
        if len(statuses) == 1:
            scripted(lambda claim: ["one"])

    settings = ApiSettings(redis_url=redis_url, file_store=str(tmp_path), expected_models=(MODEL,))
    with running_api(settings) as url, official_client(url, on_answer=on_answer) as client:
        patient = client.with_options(max_retries=openai.DEFAULT_MAX_RETRIES)
        assert patient.completions.create(model=MODEL, prompt="x").choices[0].text == "one"
    assert statuses == [503, 200]


def test_a_model_that_is_not_served_yet_or_any_more_is_a_503(http: httpx.Client, queue: Queue) -> None:
    register(queue, "loads", "not-yet", "loading")
    register(queue, "gone", "served-before", "ready")
    queue.remove_worker("gone")
    for model, code in (("not-yet", "model_loading"), ("served-before", "no_worker")):
        answer = call(http, model)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, code)
        assert int(answer.headers["retry-after"]) >= 1
    answer = http.get("/v1/models/served-before")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")


def test_a_call_to_a_model_that_its_last_worker_could_not_load_is_told_why(
    http: httpx.Client, queue: Queue, scripted: Callable[..., ScriptedWorker]
) -> None:
    queue.note_load_failure([MODEL], "it holds no weights")
    reason = f"The model `{MODEL}` could not be loaded: it holds no weights."
    for said in (reason, f"{reason} A worker is loading it again."):
        wait_until(lambda said=said: call(http, MODEL).json()["error"]["message"] == said, 60, said)  # type: ignore[misc]
        answer = call(http, MODEL)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_not_loadable")
        assert answer.headers["x-should-retry"] == "false"
        assert "retry-after" not in answer.headers
        register(queue, "second", MODEL, "loading")
    scripted(lambda claim: ["one"])
    assert call(http, MODEL).status_code == 200
    assert queue.load_failures() == {}


def test_an_emptied_redis_that_knows_one_model_again_hides_none_of_the_others(
    http: httpx.Client, queue: Queue, redis_client: redis.Redis
) -> None:
    register(queue, "one", "late", "ready")
    assert http.get("/v1/models/late").status_code == 200
    redis_client.flushall()
    register(queue, "two", "early", "ready")
    wait_until(lambda: http.get("/v1/models/early").status_code == 200, 60, "the model that came back")
    for model, status in (("late", 503), ("typo", 404)):
        assert (call(http, model).status_code, http.get(f"/v1/models/{model}").status_code) == (status, status)
    redis_client.decrby(keys.REGISTRY_SINCE, 3600_000)
    assert call(http, "late").json()["error"]["code"] == "model_not_found"  # `pipeline models forget` removed it


def test_no_client_waits_for_a_model_of_which_nothing_is_known(http: httpx.Client) -> None:
    """Nor is any other known: Redis is new."""
    answer = http.get("/v1/models/typo")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert call(http, "typo").status_code == 503  # Redis may have come back empty


def test_it_is_ready_once_a_worker_serves_a_model(
    http: httpx.Client, queue: Queue, scripted: Callable[..., ScriptedWorker]
) -> None:
    def readiness() -> tuple[int, str]:
        answer = http.get("/ready")
        assert ("retry-after" in answer.headers) == (answer.status_code == 503)
        return answer.status_code, answer.json().get("reason")

    def becomes(expected: tuple[int, str | None]) -> None:
        wait_until(lambda: readiness() == expected, 60, f"{expected}")

    becomes((503, "no worker serves a model"))
    register(queue, "loads", "not-yet", "loading")
    becomes((503, "loading not-yet"))
    scripted(lambda claim: [])
    becomes((200, None))


def call(http: httpx.Client, model: str) -> httpx.Response:
    return http.post("/v1/completions", json={"model": model, "prompt": "x"})


def test_health_counts_workers_by_state(
    http: httpx.Client, scripted: Callable[..., ScriptedWorker], redis_client: redis.Redis
) -> None:
    scripted(lambda claim: [])
    answer = http.get("/health")
    assert answer.status_code == 200
    assert answer.json()["workers"] == {"ready": 1}
    assert answer.json()["models"] == [MODEL]


@pytest.mark.parametrize(
    ("option", "reason"), [("full", "Redis is out of memory"), ("read-only", "Redis is a read-only replica")]
)
def test_a_redis_that_writes_nothing_is_unhealthy(
    http: httpx.Client, scripted: Callable[..., ScriptedWorker], redis_client: redis.Redis, option: str, reason: str
) -> None:
    def answers(status: int, reason: str | None) -> bool:
        both = [http.get("/health"), http.get("/ready")]
        return all(one.status_code == status and one.json().get("reason") == reason for one in both)

    scripted(lambda claim: [])
    wait_until(lambda: answers(200, None), 60, "a healthy API")
    try:
        if option == "full":
            redis_client.config_set("maxmemory", "1")
        else:
            redis_client.replicaof("127.0.0.1", 1)
        wait_until(lambda: answers(503, reason), 60, reason)
    finally:
        redis_client.config_set("maxmemory", "0")
        redis_client.replicaof("NO", "ONE")
    wait_until(lambda: answers(200, None), 60, "a healthy API")


def test_a_probe_that_got_its_answer_late_is_healthy(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.fleet._PROBE_SECONDS", 0.3)

    async def starved() -> None:
        with contextlib.closing(Fleet(queue)) as fleet:
            probe = asyncio.create_task(fleet.probe())
            await asyncio.sleep(0)
            time.sleep(0.6)  # no processor for the loop, while a thread reads
            assert (await probe).workers == []

    asyncio.run(starved())
