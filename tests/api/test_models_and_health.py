"""What is served, and whether the process can work."""

import time
from collections.abc import Callable

import httpx
import openai
import redis

from jobs.queue.registry import WorkerRecord
from jobs.queue.request_queue import Queue
from tests.api.scripted_worker import MODEL, ScriptedWorker


def test_models_are_those_of_ready_workers(
    client: openai.OpenAI, queue: Queue, scripted: Callable[..., ScriptedWorker]
) -> None:
    queue.register_worker(WorkerRecord("loading", ["not-yet"], "loading", 0, time.time(), "host", 2))
    scripted(lambda claim: [], models=(MODEL, "org/another"))
    assert [model.id for model in client.models.list()] == ["org/another", MODEL]
    model = client.models.retrieve("org/another")
    assert (model.id, model.object) == ("org/another", "model")
    assert model.created > 0


def test_a_model_that_is_being_loaded_is_a_503(http: httpx.Client, queue: Queue) -> None:
    queue.register_worker(WorkerRecord("loading", ["not-yet"], "loading", 0, time.time(), "host", 2))
    answer = http.post("/v1/completions", json={"model": "not-yet", "prompt": "x"})
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "model_loading"


def test_a_model_whose_workers_are_gone_is_a_503(http: httpx.Client, queue: Queue) -> None:
    queue.register_worker(WorkerRecord("gone", ["served-before"], "ready", 4096, time.time(), "host", 2))
    queue.remove_worker("gone")
    answer = http.post("/v1/completions", json={"model": "served-before", "prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_worker")


def test_health_counts_workers_by_state(
    http: httpx.Client, scripted: Callable[..., ScriptedWorker], redis_client: redis.Redis
) -> None:
    scripted(lambda claim: [])
    answer = http.get("/health")
    assert answer.status_code == 200
    assert answer.json()["workers"] == {"ready": 1}
    assert answer.json()["models"] == [MODEL]
