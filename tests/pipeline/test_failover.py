"""A failover to the replica under a whole fleet at work, by the death of the master and by an order
to the Sentinels: no process ends, each line and each live call is answered once and right.

Replication lags, so the new master may lack the last writes: what they recorded runs again.
"""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.pipeline.results import answers, examples, read_results, text_of
from tests.support.fleet import running_fleet
from tests.support.integrity import faults
from tests.support.sentinel_fleet import SentinelFleet

pytestmark = [pytest.mark.proof, pytest.mark.timeout(600)]
COPIES = 8  # of the 300 example requests: a failover by order takes some seconds
END_SECONDS = 240


@pytest.fixture(scope="module")
def fleet() -> Iterator[SentinelFleet]:
    with running_fleet(workers=2, api=True, stream_interval=0.2, kind=SentinelFleet) as fleet:
        yield fleet


def the_master_dies(fleet: SentinelFleet) -> None:
    fleet.sentinels.kill_master().start()


def an_order(fleet: SentinelFleet) -> None:
    fleet.sentinels.fail_over()


@pytest.mark.parametrize("fail_over", [the_master_dies, an_order])
def test_each_line_and_call_is_answered_once_over_a_failover(
    fleet: SentinelFleet, fail_over: Callable[[SentinelFleet], None], tmp_path: Path
) -> None:
    fleet.sentinels.wait_whole()
    client = openai.OpenAI(base_url=f"{fleet.api_url}/v1", api_key="none", max_retries=0, timeout=END_SECONDS)
    requests = [json.loads(line) for line in examples(tmp_path / "examples", 300).read_text().splitlines()]
    batch = submit(client, requests)
    with LiveCallers(client, requests) as callers:
        fleet.wait(lambda: completed(client, batch) > 20 and callers.answered > 3, END_SECONDS, "all to be under way")
        assert completed(client, batch) < COPIES * len(requests), "the batch ended before the failover"
        fail_over(fleet)
        answered = callers.answered
        left = COPIES * len(requests) - completed(client, batch)
        print(f"{left} lines left after the failover")
        assert left > 0
        fleet.wait(lambda: has_ended(client, batch), END_SECONDS, "the batch to end")
        fleet.wait(lambda: callers.answered > answered + 3, END_SECONDS, "live calls at the new master")
    assert callers.wrong == []
    assert_each_line_once(client, batch, tmp_path)
    fleet.sentinels.wait_whole()
    assert fleet.exits == {}
    complaints = "".join(member.log for member in fleet.members.values() if "Traceback" in member.log)
    assert not complaints, complaints
    assert faults(fleet.client) == []


def submit(client: openai.OpenAI, requests: list[dict[str, Any]]) -> str:
    lines = [
        {**request, "custom_id": f"{copy}/{request['custom_id']}", "body": {**request["body"], "seed": copy}}
        for copy in range(COPIES)
        for request in requests
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    file = client.files.create(file=("in.jsonl", text.encode()), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h").id


def completed(client: openai.OpenAI, batch: str) -> int:
    counts = client.batches.retrieve(batch).request_counts
    return 0 if counts is None else counts.completed


def has_ended(client: openai.OpenAI, batch: str) -> bool:
    """While Redis is away the API answers 503."""
    try:
        return client.batches.retrieve(batch).status in ("completed", "failed")
    except openai.InternalServerError:
        return False


def assert_each_line_once(client: openai.OpenAI, batch: str, folder: Path) -> None:
    ended = client.batches.retrieve(batch)
    right = answers()
    expected = [f"{copy}/{name}" for copy in range(COPIES) for name in right]
    assert ended.request_counts is not None
    assert ended.request_counts.model_dump() == {"total": len(expected), "completed": len(expected), "failed": 0}
    assert ended.error_file_id is None
    output = folder / "out.jsonl"
    output.write_bytes(client.files.content(str(ended.output_file_id)).content)
    texts = [(result["custom_id"], text_of(result)) for result in read_results(output)]
    assert sorted(name for name, _ in texts) == sorted(expected)
    assert [(name, text) for name, text in texts if text != right[name.partition("/")[2]]] == []


class LiveCallers:
    """Two clients that stream one answer after the other, until the end of the context."""

    def __init__(self, client: openai.OpenAI, requests: list[dict[str, Any]]) -> None:
        self._client = client
        self._right = answers()
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(requests[half::2],), daemon=True) for half in (0, 1)]
        self.answered = 0
        self.wrong: list[str] = []

    def __enter__(self) -> "LiveCallers":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(END_SECONDS)

    def _run(self, requests: list[dict[str, Any]]) -> None:
        while True:
            for request in requests:
                if self._stopping.is_set():
                    return
                self._ask(request)

    def _ask(self, request: dict[str, Any]) -> None:
        try:
            stream = self._client.chat.completions.create(**request["body"], stream=True)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        except openai.OpenAIError as error:
            self.wrong.append(f"{request['custom_id']}: {error!r}")
            return
        self.answered += 1
        if text != self._right[request["custom_id"]]:
            self.wrong.append(f"{request['custom_id']}: {text!r}")
