"""A disk that answers late, or never, holds up what needs it and nothing else."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from tests.api.scripted_worker import MODEL, ScriptedWorker
from tests.support.waiting import wait_until

pytestmark = pytest.mark.proof

BLOCKED = 12  # more than the threads that asyncio has by default on a small machine


def test_batches_that_wait_for_the_disk_delay_no_live_call(
    http: httpx.Client,
    client: openai.OpenAI,
    scripted: Callable[..., ScriptedWorker],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scripted(lambda claim: ["some ", "text"])
    file = client.files.create(file=("input.jsonl", b'{"custom_id": "a"}\n'), purpose="batch").id
    waiting, disk, sync = threading.Semaphore(0), threading.Event(), os.fsync

    def late_sync(descriptor: int) -> None:
        waiting.release()
        assert disk.wait(120)
        sync(descriptor)

    def create() -> str:
        return client.batches.create(input_file_id=file, endpoint="/v1/completions", completion_window="24h").status

    monkeypatch.setattr(os, "fsync", late_sync)
    with ThreadPoolExecutor(BLOCKED) as threads:
        try:
            creating = [threads.submit(create) for _ in range(BLOCKED)]
            wait_until(lambda: waiting.acquire(timeout=0.1), 60, "a batch that waits for the disk")
            plain, streamed = ({"model": MODEL, "prompt": "x", "stream": stream} for stream in (False, True))
            assert http.post("/v1/completions", json=plain, timeout=30).json()["choices"][0]["text"] == "some text"
            assert http.post("/v1/completions", json=streamed, timeout=30).text.endswith("data: [DONE]\n\n")
            assert not any(create.done() for create in creating)
        finally:
            disk.set()
        assert {create.result() for create in creating} == {"validating"}
