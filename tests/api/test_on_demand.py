"""Calls for models that a server loads when work for them waits."""

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
import openai
import pytest

from api.settings import ApiSettings
from jobs.queue.on_demand import OnDemandModel
from jobs.queue.registry import WorkerRecord
from jobs.queue.request_queue import Queue
from tests.api.scripted_worker import MODEL, ScriptedWorker
from tests.api.test_models_and_health import call, register
from tests.support.api_server import official_client, plain_client, running_api
from tests.support.commands import running_pipeline
from tests.support.ports import reserved_port
from tests.support.waiting import wait_until

OFFER = OnDemandModel("server-1")
NO_ROOM = "needs about 2.00 GiB of memory, and 1.00 GiB are available beside `other`, which is at work"


@pytest.fixture
def hasty_url(redis_url: str, tmp_path: Path) -> Iterator[str]:
    """The address of an API whose calls wait for a model for a second."""
    with running_api(ApiSettings(redis_url=redis_url, file_store=str(tmp_path), load_timeout=1.0)) as url:
        yield url


def test_all_models_are_listed_with_whether_they_are_loaded(
    client: openai.OpenAI, http: httpx.Client, queue: Queue, scripted: Callable[..., ScriptedWorker]
) -> None:
    bad = OnDemandModel("server-1", failure="could not be loaded: it holds no weights", refusal="failed")
    queue.offer(dict.fromkeys((MODEL, "loads", "asleep"), OFFER) | {"bad": bad}, [])
    register(queue, "first", "loads", "loading")
    register(queue, "killed", "bad", "loading")
    scripted(lambda claim: [])
    assert http.get("/ready").json() == {"status": "ready", "models": ["asleep", "bad", "loads", MODEL]}
    listed = {
        model.id: (extra["status"], extra["loaded"]) for model in client.models.list() if (extra := model.to_dict())
    }
    waiting = {"loads": ("loading", False), "asleep": ("unloaded", False), "bad": ("unloaded", False)}
    assert listed == {MODEL: ("ready", True), **waiting}
    assert client.models.retrieve("asleep").to_dict()["loaded"] is False
    answer = call(http, "typo")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert "`asleep`" in answer.json()["error"]["message"]


def test_a_model_of_two_names_is_listed_once_and_answers_to_both(
    client: openai.OpenAI, http: httpx.Client, queue: Queue, scripted: Callable[..., ScriptedWorker]
) -> None:
    queue.offer({"asleep": OFFER, "/models/asleep": OnDemandModel("server-1", alias=True)}, [])
    names = [f"/models/{MODEL}", MODEL]
    record = WorkerRecord("loads", names, "loading", 0, 1.0, "host", 1, aliases=names[:1])
    queue.register_worker(record)
    assert http.get("/ready").json() == {"status": "ready", "models": ["asleep"]}
    assert [model.id for model in client.models.list()] == [MODEL, "asleep"]
    queue.register_worker(msgspec.structs.replace(record, state="ready"))
    wait_until(lambda: http.get("/ready").json()["models"] == ["asleep", MODEL], 60, "the model to be ready")
    assert [model.id for model in client.models.list()] == [MODEL, "asleep"]
    assert client.models.retrieve(names[0]).id == names[0]
    assert http.get("/health").json()["models"] == [MODEL]
    assert "/models" not in call(http, "typo").json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_waits_until_its_model_is_loaded(
    client: openai.OpenAI, queue: Queue, scripted: Callable[..., ScriptedWorker], stream: bool
) -> None:
    queue.offer({MODEL: OFFER}, [MODEL])
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.completions.create, model=MODEL, prompt="x", stream=stream)  # type: ignore[call-overload]
        wait_until(lambda: queue.waiting_work([MODEL])[MODEL][0], 60, "the call to wait")
        assert len(queue.control_messages("server-1", "0-0", 0)) == 1
        scripted(lambda claim: ["one"])
        result = answer.result(60)
    assert (next(iter(result)) if stream else result).choices[0].text == "one"


def test_a_call_waits_for_a_model_that_an_autoscaler_starts(
    redis_url: str, tmp_path: Path, scripted: Callable[..., ScriptedWorker]
) -> None:
    """Its metric counts the call, though no worker has ever been there."""
    settings = ApiSettings(redis_url=redis_url, file_store=str(tmp_path), on_demand_models=(MODEL,))
    waiting = f'pipeline_requests_waiting{{kind="live",model_name="{MODEL}"}}'
    with running_api(settings) as url, official_client(url) as client, plain_client(url) as http:
        assert f"{waiting} 0.0" in http.get("/metrics").text
        assert http.get("/ready").json() == {"status": "ready", "models": [MODEL]}
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(client.completions.create, model=MODEL, prompt="x")
            wait_until(lambda: f"{waiting} 1.0" in http.get("/metrics").text, 60, "the call to wait")
            scripted(lambda claim: ["one"])
            assert answer.result(60).choices[0].text == "one"
        wait_until(lambda: f"{waiting} 0.0" in http.get("/metrics").text, 60, "no call to wait")


def test_a_model_of_the_settings_does_not_hide_that_redis_came_back_empty(
    redis_url: str, tmp_path: Path, queue: Queue, scripted: Callable[..., ScriptedWorker]
) -> None:
    settings = ApiSettings(redis_url=redis_url, file_store=str(tmp_path), on_demand_models=("asleep",))
    with running_api(settings) as url, plain_client(url) as http:
        answer = call(http, MODEL)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_worker")
        register(queue, "another", "another", "ready")
        answer = call(http, MODEL)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.proof
def test_a_call_that_waits_longer_than_the_server_has_to_stop_is_told_so(redis_url: str, tmp_path: Path) -> None:
    variables = {"REDIS_URL": redis_url, "FILE_STORE": str(tmp_path)}
    with reserved_port() as port:
        url, flags = f"http://127.0.0.1:{port}", ("--timeout-graceful-shutdown=1", f"--on-demand-model={MODEL}")
        with running_pipeline("api", f"--port={port}", *flags, **variables) as api:
            api.wait_for("listening on", 60)
            with plain_client(url) as http, ThreadPoolExecutor(1) as pool:
                answer = pool.submit(call, http, MODEL)
                waiting = f'pipeline_requests_waiting{{kind="live",model_name="{MODEL}"}} 1.0'
                wait_until(lambda: waiting in http.get("/metrics").text, 60, "the call to wait")
                api.process.send_signal(signal.SIGTERM)
                refusal = answer.result(60)
            assert (refusal.status_code, refusal.json()["error"]["code"]) == (503, "server_stopping")
            assert api.wait(60) == 0, api.output


def test_a_call_waits_for_a_limited_time(hasty_url: str, queue: Queue) -> None:
    with plain_client(hasty_url) as http:
        for problem, code in (("", "model_loading"), (NO_ROOM, "insufficient_memory")):
            queue.offer({MODEL: OnDemandModel("server-1", problem)}, [])
            wait_until(lambda: http.get(f"/v1/models/{MODEL}").status_code == 200, 60, "the offer to be seen")
            answer = call(http, MODEL)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, code)
            assert int(answer.headers["retry-after"]) >= 1
            assert (problem or "was not loaded within 1 s") in answer.json()["error"]["message"]
            wait_until(lambda: not queue.waiting_work([MODEL])[MODEL][0], 60, "the call to be gone")


def test_a_call_for_a_model_that_cannot_be_loaded_is_refused_at_once(http: httpx.Client, queue: Queue) -> None:
    bad = OnDemandModel("s", failure="could not be loaded: there is no model folder /secret", refusal="failed")
    queue.offer({"big": OnDemandModel("s", NO_ROOM, refusal="memory"), "bad": bad, "worse": bad}, [])
    queue.note_load_failure(["worse"], "it holds no weights")
    for model, code, said in (
        ("big", "insufficient_memory", f"The model `big` {NO_ROOM}."),
        ("bad", "model_not_loadable", "The model `bad` could not be loaded, and the server's log says why."),
        ("worse", "model_not_loadable", "The model `worse` could not be loaded: it holds no weights."),
    ):
        answer = call(http, model)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["message"]) == (503, code, said)
        assert answer.headers["x-should-retry"] == "false"
        assert "retry-after" not in answer.headers


def test_a_call_without_a_model_is_for_the_only_one(
    redis_url: str, tmp_path: Path, queue: Queue, scripted: Callable[..., ScriptedWorker]
) -> None:
    queue.offer({MODEL: OFFER, "another": OFFER}, [])
    with running_api(ApiSettings(redis_url=redis_url, file_store=str(tmp_path))) as url, official_client(url) as client:
        scripted(lambda claim: [])
        with pytest.raises(openai.BadRequestError, match="model"):
            client.post("../tokenize", cast_to=object, body={"prompt": "x"})
