"""A thousand streams at once, while clients leave and processes are killed: whoever stays gets the
whole answer, and nothing is left of any of them.
"""

import asyncio
import random
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.pipeline.test_pool import pool
from tests.support import http_calls
from tests.support.fleet import LocalFleet, running_fleet
from tests.support.integrity import faults
from tests.support.poison import Poison, held, poisoned_environment
from tests.support.ports import reserved_port
from tests.support.storm import Storm, StormQuestion
from tests.support.waiting import wait_until

STREAMS = 1000
KEEP_SECONDS = 300  # for which the stream of an ended call can be read
_LOOK_SECONDS = 0.05


class StormFleet(LocalFleet):
    """One worker with room for all, which reaches Redis as in production, and two API processes."""

    def worker_urls(self, url: str, workers: int) -> list[str]:
        return [url] * workers

    def add_api(self) -> str:
        """Start a second API process; its address."""
        port = self._stack.enter_context(reserved_port())
        self._add("api-1", self.redis.url, "api", "--port", port, "--file-store", self.store)
        address = f"http://127.0.0.1:{port}"
        self.wait(lambda: http_calls.get(f"{address}/health").json().get("models"), 60, "the second API process")
        return address


@pytest.mark.proof
@pytest.mark.timeout(600)
@pytest.mark.parametrize("apis", [1, 2])
def test_a_thousand_streams_outlast_a_worker_and_an_api_process(
    apis: int, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = tmp_path / "hold"
    for name, value in poisoned_environment(Poison("", "hold"), hold=hold).items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "f"  # short, for the socket in it
    folder.mkdir()
    with running_fleet(folder, api=True, max_num_seqs=1024, kind=StormFleet) as fleet:
        assert fleet.api_url is not None
        urls = [fleet.api_url, *(fleet.add_api() for _ in range(apis - 1))]
        ask_once(fleet, urls)
        before = Rest(fleet, urls)
        rng = random.Random(seed)
        storm = Storm(urls, rng.sample(questions(), STREAMS), rng)
        began = time.monotonic()
        asyncio.run(rage(fleet, storm, hold))
        print(f"{storm.report()} in {time.monotonic() - began:.1f} s")
        assert storm.faults == []
        assert storm.right == STREAMS // 2
        assert {name: len(exits) for name, exits in fleet.exits.items()} == {"api": 1, "worker-0": 1}
        ask_once(fleet, urls)
        before.wait_for_it()


def questions() -> list[StormQuestion]:
    """Those with a short prompt."""
    return [
        StormQuestion(
            {"model": "demo", "messages": row["messages"], "max_tokens": row["max_tokens"], "temperature": 0},
            str(row["answer"]),
            row["answer_tokens"],  # type: ignore[arg-type]
        )
        for row in pool()
        if len(row["messages"]) == 1  # type: ignore[arg-type]
    ]


def ask_once(fleet: LocalFleet, urls: list[str]) -> None:
    """One call to each API process, so that all is there that an idle one has; one that was killed
    may not be back yet.
    """
    for url in urls:
        fleet.wait(partial(answers, url), 60, "an answer")


async def rage(fleet: LocalFleet, storm: Storm, hold: Path) -> None:
    """Run the storm.

    No step of the engine ends before every stream has begun. The worker is killed when some of the
    tokens have come, the API process when more have.
    """
    with held(hold):
        running = asyncio.create_task(storm.run())
        await reach(fleet, running, lambda: storm.is_whole, "every stream to begin")
    await reach(fleet, running, lambda: storm.tokens > 0.2 * storm.expected_tokens, "some tokens")
    fleet.members["worker-0"].send(signal.SIGKILL)
    await reach(fleet, running, lambda: storm.tokens > 0.5 * storm.expected_tokens, "half of the tokens")
    fleet.members["api"].send(signal.SIGKILL)
    await reach(fleet, running, running.done, "the end of all streams")
    await running


async def reach(fleet: LocalFleet, running: "asyncio.Task[None]", condition: Callable[[], bool], what: str) -> None:
    """Wait until the condition is true, looking after the fleet."""
    async with asyncio.timeout(240):
        while not condition():
            assert not running.done(), f"the storm was over before: {what}"
            fleet.look_after()
            await asyncio.sleep(_LOOK_SECONDS)


class Rest:
    """What a fleet holds while nothing is done."""

    def __init__(self, fleet: LocalFleet, urls: list[str]) -> None:
        self._fleet = fleet
        self._urls = urls
        self._kinds = self._kinds_of_keys()

    def wait_for_it(self) -> None:
        """Wait until nothing more is held, when the streams of ended calls have had their time."""
        for url in self._urls:
            wait_until(partial(has_no_call, url), 60, "no call to be left")
            wait_until(partial(has_no_connection, url), 60, "no connection to be left")
        wait_until(lambda: self._metric("vllm:num_requests_running") == 0, 60, "no request to run in the engine")
        assert self._metric("vllm:num_requests_waiting") == 0
        assert self._metric("vllm:kv_cache_usage_perc") == 0
        self._fleet.redis.clock.step(KEEP_SECONDS + 1)
        wait_until(lambda: self._kinds_of_keys() <= self._kinds, 60, "no key of another kind to be left")
        assert faults(self._fleet.client) == []

    def _metric(self, name: str) -> float:
        text = http_calls.get(f"{self._urls[0]}/metrics").text
        found = re.search(rf"^{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
        assert found is not None, text
        return float(found[1])

    def _kinds_of_keys(self) -> set[str]:
        return {":".join(name.decode().split(":")[:2]) for name in self._fleet.client.scan_iter("*")}


def answers(url: str) -> bool:
    body = {"model": "demo", "prompt": "List", "max_tokens": 2}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200


def has_no_call(url: str) -> bool:
    return bool(http_calls.get(f"{url}/health").json().get("live_calls") == 0)


def has_no_connection(url: str) -> bool:
    """Whether a server on this machine has closed all of its clients."""
    port = httpx.URL(url).port
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return not any(int(row[1].split(":")[1], 16) == port and row[3] in ("01", "08") for row in rows)
