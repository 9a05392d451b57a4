"""Live calls through the official client: what it sees came from a worker through Redis."""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import pytest

from api.settings import ApiSettings
from jobs.protocol.results import ApiError
from jobs.queue.request_queue import Queue
from tests.api.scripted_worker import MODEL, ScriptedWorker
from tests.support.api_server import running_api
from tests.support.waiting import wait_until

Scripted = Callable[..., ScriptedWorker]
PIECES = ["Hel", "lo ", "wörld", " 🙂"]
MESSAGES = [{"role": "user", "content": "Say hello."}]


def test_chat_answers_whole(client: openai.OpenAI, scripted: Scripted) -> None:
    scripted(lambda claim: PIECES)
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES)  # type: ignore[arg-type]
    assert answer.choices[0].message.content == "".join(PIECES)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (7, 4, 11)
    assert answer._request_id


def test_completion_answers_whole(client: openai.OpenAI, scripted: Scripted) -> None:
    scripted(lambda claim: PIECES)
    answer = client.completions.create(model=MODEL, prompt="Once")
    assert answer.object == "text_completion"
    assert answer.choices[0].text == "".join(PIECES)


def test_a_stream_that_outlasts_the_stop_of_the_server_is_cut_off(
    redis_url: str, tmp_path: Path, scripted: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    worker = scripted(lambda claim: PIECES)
    worker.step = threading.Semaphore(1)
    call = {"model": MODEL, "prompt": "Once", "stream": True}
    with contextlib.ExitStack() as running:
        url = running.enter_context(running_api(ApiSettings(redis_url=redis_url, file_store=str(tmp_path))))
        with httpx.stream("POST", f"{url}/v1/completions", json=call, timeout=60) as answer:
            received = answer.iter_raw()
            next(received)
            running.close()
            with pytest.raises(httpx.RemoteProtocolError):
                list(received)
    assert "an answer to POST /v1/completions is cut off: the server is being stopped" in caplog.text
    assert "Traceback" not in caplog.text


def test_chat_streams_each_piece_before_the_next_exists(client: openai.OpenAI, scripted: Scripted) -> None:
    worker = scripted(lambda claim: PIECES)
    worker.step = threading.Semaphore(0)
    stream = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )  # type: ignore[call-overload]
    chunks = []
    for chunk in stream:
        chunks.append(chunk)
        worker.step.release()
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert texts == PIECES
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 4
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 3
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_completion_streams(client: openai.OpenAI, scripted: Scripted) -> None:
    scripted(lambda claim: PIECES)
    chunks = list(client.completions.create(model=MODEL, prompt="Once", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "".join(PIECES)
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert all(chunk.usage is None for chunk in chunks)


def test_the_bytes_of_a_stream_are_openais(http: httpx.Client, scripted: Scripted) -> None:
    scripted(lambda claim: ["a", "b"])
    answer = http.post("/v1/chat/completions", json={"model": MODEL, "messages": MESSAGES, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert "x-request-id" in answer.headers
    events = answer.text.split("\n\n")
    assert events[-1] == ""
    assert events[-2] == "data: [DONE]"
    assert all(event.startswith("data: ") for event in events[:-1])
    first = json.loads(events[0].removeprefix("data: "))
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "usage" not in first


def test_a_slow_worker_gets_comments_meanwhile(http: httpx.Client, scripted: Scripted) -> None:
    worker = scripted(lambda claim: ["a"])
    worker.step = threading.Semaphore(0)
    lines: list[str] = []
    deadline = time.monotonic() + 60
    with http.stream("POST", "/v1/completions", json={"model": MODEL, "prompt": "x", "stream": True}) as answer:
        for line in answer.iter_lines():
            lines.append(line)
            if line == ": ping":
                worker.step.release()
            if line == "data: [DONE]" or time.monotonic() > deadline:
                break
    assert ": ping" in lines
    assert lines[-1] == "data: [DONE]"


def test_the_status_of_a_streamed_call_waits_for_the_worker(client: openai.OpenAI, scripted: Scripted) -> None:
    message = "This model's maximum context length is 128 tokens."
    scripted(lambda claim: ApiError(400, message, param="messages", code="context_length_exceeded"))
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)  # type: ignore[call-overload]
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "messages"


def test_a_workers_error_of_a_request_is_not_repeated(client: openai.OpenAI, scripted: Scripted) -> None:
    """OpenAI's clients repeat a call that ends with 500, unless a header forbids it."""
    worker = scripted(lambda claim: ApiError(500, "The model failed.", "server_error", code="not_finite"))
    with pytest.raises(openai.InternalServerError) as caught:
        client.with_options(max_retries=2).chat.completions.create(model=MODEL, messages=MESSAGES)  # type: ignore[arg-type]
    assert caught.value.code == "not_finite"
    assert len(worker.claims) == 1


def test_a_bad_value_is_refused_without_a_worker(client: openai.OpenAI, scripted: Scripted) -> None:
    worker = scripted(lambda claim: PIECES)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=-1)  # type: ignore[arg-type]
    assert caught.value.param == "temperature"
    assert worker.claims == []


def test_an_unknown_model_is_a_404_that_names_what_is_served(client: openai.OpenAI, scripted: Scripted) -> None:
    scripted(lambda claim: PIECES)
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="other", prompt="x")
    assert caught.value.code == "model_not_found"
    assert MODEL in caught.value.message


def test_a_client_that_leaves_cancels_its_stream(client: openai.OpenAI, queue: Queue, scripted: Scripted) -> None:
    worker = scripted(lambda claim: ["x"] * 10_000)
    worker.step = threading.Semaphore(3)
    stream = client.completions.create(model=MODEL, prompt="x", stream=True)
    next(iter(stream))
    stream.close()
    wait_until(lambda: worker.cancelled, 60, "the worker to lose the call")


def test_a_client_that_leaves_cancels_its_plain_call(api_url: str, scripted: Scripted) -> None:
    worker = scripted(lambda claim: ["x"])
    worker.step = threading.Semaphore(0)

    async def leave() -> None:
        async with openai.AsyncOpenAI(base_url=f"{api_url}/v1", api_key="none", max_retries=0, timeout=60) as client:
            call = asyncio.create_task(client.completions.create(model=MODEL, prompt="x"))
            await asyncio.to_thread(wait_until, lambda: worker.claims, 60, "the worker to have the call")
            call.cancel()

    asyncio.run(leave())
    wait_until(lambda: worker.cancelled, 60, "the worker to lose the call")


def test_clients_that_leave_while_the_api_asks_after_their_calls_cancel_them(
    client: openai.OpenAI, http: httpx.Client, scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks again and again here, so that some of them leave just as a question is sent."""
    monkeypatch.setattr("api.live_call._SILENCE_SECONDS", 0.01)
    worker = scripted(lambda claim: ["x"])
    worker.step = threading.Semaphore(0)
    streams = [client.completions.create(model=MODEL, prompt="x", stream=True) for _ in range(32)]
    for stream in streams:
        stream.close()
    wait_until(lambda: http.get("/health").json()["live_calls"] == 0, 60, "the API to end the calls")
    wait_until(lambda: len(worker.cancelled) == len(streams), 60, "the worker to lose them")


def test_many_calls_at_once_get_their_own_answers(client: openai.OpenAI, scripted: Scripted) -> None:
    scripted(lambda claim: [json.loads(claim.request.body)["prompt"], "!"])
    answers: dict[int, str] = {}

    def call(number: int) -> None:
        stream = client.completions.create(model=MODEL, prompt=f"p{number}", stream=True)
        answers[number] = "".join(chunk.choices[0].text for chunk in stream)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: f"p{number}!" for number in range(24)}


def test_a_reader_that_fell_behind_catches_up_from_the_requests_own_stream(
    http: httpx.Client, scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("api.inbox.QUEUE_LENGTH", 1)
    pieces = [f"{number} " for number in range(500)]
    scripted(lambda claim: pieces)
    answer = http.post("/v1/completions", json={"model": MODEL, "prompt": "x", "stream": True})
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "".join(pieces)
