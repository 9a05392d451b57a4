"""Headers of answers: how long they took, which version they are of, what is left of a limit."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from api.http.answer_headers import openai_duration
from api.settings import ApiSettings
from jobs.store.api_keys import create_key
from tests.api.scripted_worker import FINGERPRINT, MODEL, ScriptedWorker
from tests.support.api_server import plain_client, running_api
from tests.support.waiting import wait_until

Scripted = Callable[..., ScriptedWorker]
CALL = {"model": MODEL, "prompt": "x"}


@pytest.mark.parametrize("path", ["/health", "/version", "/v1/models", "/v1/models/none", "/nothing", "/metrics"])
def test_every_answer_says_how_long_it_took(http: httpx.Client, path: str) -> None:
    headers = http.get(path).headers
    assert int(headers["openai-processing-ms"]) >= 0
    assert headers["openai-version"] == "2020-10-01"
    assert headers.get_list("x-request-id") == [headers["x-request-id"]]


def test_a_plain_answer_took_all_its_time_and_a_stream_that_until_its_head(
    http: httpx.Client, scripted: Scripted
) -> None:
    worker = scripted(lambda claim: ["a"])
    worker.step = threading.Semaphore(0)
    with ThreadPoolExecutor(1) as pool:
        plain = pool.submit(lambda: http.post("/v1/completions", json=CALL))
        wait_until(lambda: worker.claims, 60, "the call")
        began = time.monotonic()
        wait_until(lambda: time.monotonic() > began + 0.5, 60, "half a second")
        worker.step.release()
        assert int(plain.result(60).headers["openai-processing-ms"]) > 300
    began = time.monotonic()
    with http.stream("POST", "/v1/completions", json={**CALL, "stream": True}) as answer:
        to_head = 1000 * (time.monotonic() - began)
        assert 0 <= int(answer.headers["openai-processing-ms"]) <= to_head
        assert answer.headers.get_list("x-request-id") == [answer.headers["x-request-id"]]
        worker.step.release()
        answer.read()


def test_a_live_call_says_how_many_more_there_may_be_at_once(
    redis_url: str, tmp_path: Path, scripted: Scripted
) -> None:
    worker = scripted(lambda claim: ["a"])
    worker.step = threading.Semaphore(0)
    settings = ApiSettings(redis_url=redis_url, file_store=str(tmp_path), live_calls_per_tenant=2)
    with running_api(settings) as url, plain_client(url) as http, ThreadPoolExecutor(2) as pool:
        first = pool.submit(lambda: http.post("/v1/completions", json=CALL))
        wait_until(lambda: len(worker.claims) == 1, 60, "the first call")
        second = pool.submit(lambda: http.post("/v1/completions", json=CALL))
        wait_until(lambda: len(worker.claims) == 2, 60, "the second call")
        third = http.post("/v1/completions", json=CALL)
        worker.step.release(2)
        answers = [first.result(60), second.result(60), third]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    names = ("limit", "remaining", "reset")
    found = [[answer.headers[f"x-ratelimit-{name}-requests"] for name in names] for answer in answers]
    assert found == [["2", "1", "0ms"], ["2", "0", "5s"], ["2", "0", "5s"]]
    assert third.headers["retry-after"] == "5"


def test_a_limit_by_the_minute_goes_before_that(redis_url: str, tmp_path: Path, scripted: Scripted) -> None:
    scripted(lambda claim: ["a"])
    _, secret = create_key(str(tmp_path), tenant="a", requests_per_minute=60)
    with running_api(ApiSettings(redis_url=redis_url, file_store=str(tmp_path))) as url, plain_client(url) as http:
        answer = http.post("/v1/completions", json=CALL, headers={"authorization": f"Bearer {secret}"})
    assert answer.headers["x-ratelimit-limit-requests"] == "60"
    assert answer.headers.get_list("x-ratelimit-remaining-requests") == ["59"]


@pytest.mark.parametrize(
    ("seconds", "written"), [(0, "0ms"), (0.12, "120ms"), (1, "1s"), (59.2, "1m0s"), (360, "6m0s")]
)
def test_a_time_is_written_as_the_hosted_service_does(seconds: float, written: str) -> None:
    assert openai_duration(seconds) == written


def test_a_stream_and_a_plain_answer_say_the_same_of_the_worker_and_the_tier(
    http: httpx.Client, scripted: Scripted
) -> None:
    scripted(lambda claim: ["a"])
    call = {**CALL, "service_tier": "auto"}
    plain = http.post("/v1/completions", json=call).json()
    stream = http.post("/v1/completions", json={**call, "stream": True}).text
    assert (plain["system_fingerprint"], plain["service_tier"]) == (FINGERPRINT, "default")
    chunks = [line for line in stream.splitlines() if line.startswith("data: {")]
    assert len(chunks) > 1
    for chunk in chunks:
        assert f'"system_fingerprint":"{FINGERPRINT}"' in chunk
        assert '"service_tier":"default"' in chunk
    assert "service_tier" not in http.post("/v1/completions", json=CALL).json()
