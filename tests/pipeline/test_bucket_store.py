"""`pipeline serve` with its file store in a bucket of SeaweedFS, and in a container of Azurite: the
official client, and processes that are killed.
"""

import os
import random
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import openai
import pytest
import redis
from openai.types import Batch

from jobs.protocol.states import END_STATES
from jobs.store.storage import list_names
from tests.pipeline.conftest import RunHere
from tests.pipeline.results import check_answers, examples
from tests.support import http_calls
from tests.support.commands import REPOSITORY, run_pipeline, running_pipeline
from tests.support.object_stores import bucket, cloud
from tests.support.ports import reserved_port
from tests.support.processes import command_line, descendants
from tests.support.redis_server import running_server
from tests.support.seaweedfs import seaweedfs
from tests.support.waiting import wait_until

KILLED = ("pipeline api", "jobs.control.rq_worker", "jobs.control.ticker", "pipeline serve")
LINES = 300
ROUNDS = 8
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module", params=["seaweedfs", "az"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    is_azure = request.param == "az"
    with cloud("az") if is_azure else seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as uri:
        yield f"{uri}/a/fleet"


class KilledServer:
    """A server that is started again, at the same address, when it was killed."""

    def __init__(self, store: str, redis_url: str, port: int) -> None:
        self._flags = ("serve", "--port", port, "--file-store", store)
        self._redis_url = redis_url
        self._running = running_pipeline(*self._flags, redis_url=redis_url)
        self.command = self._running.__enter__()
        self.url = f"http://127.0.0.1:{port}"

    def kill(self, rng: random.Random, target: str) -> None:
        """Kill a process of that kind."""
        found = [pid for pid in self._processes() if target in command_line(pid)]
        if found:
            os.kill(rng.choice(found), signal.SIGKILL)
        if target == "pipeline serve":
            self.command.process.wait()
            self._running.__exit__(None, None, None)
            self._running = running_pipeline(*self._flags, redis_url=self._redis_url)
            self.command = self._running.__enter__()

    def wait_ready(self) -> None:
        wait_until(self._serves, 150, "the model to be served")

    def stop(self) -> None:
        self._running.__exit__(None, None, None)

    def _processes(self) -> list[int]:
        return [self.command.process.pid, *descendants(self.command.process.pid)]

    def _serves(self) -> bool:
        try:
            return bool(http_calls.get(f"{self.url}/health").json().get("models"))
        except httpx.HTTPError:
            return False


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_kills_and_an_emptied_redis_lose_and_repeat_nothing(store: str, tmp_path: Path) -> None:
    seed = int(os.environ.get("KILL_SEED", 1))
    print(f"seed {seed} (set KILL_SEED to draw others)")
    rng = random.Random(seed)
    with running_server() as server, reserved_port() as port:
        served = KilledServer(store, server.url, port)
        try:
            served.wait_ready()
            for number in range(ROUNDS):
                _run_round(
                    served, server.url, rng, KILLED[number % len(KILLED)], examples(tmp_path / "in.jsonl", LINES)
                )
        finally:
            served.stop()


def _run_round(served: KilledServer, redis_url: str, rng: random.Random, target: str, source: Path) -> None:
    print(f"killing {target}")
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=20, timeout=60) as client:
        file = client.files.create(file=source, purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        wanted = rng.randrange(LINES)
        wait_until(lambda: _done(client, batch) >= wanted, 150, f"{wanted} lines")
        served.kill(rng, target)
        if rng.random() < 0.5:
            with redis.Redis.from_url(redis_url) as emptied:
                emptied.flushall()
            print("emptied Redis")
        wait_until(lambda: _ended(client, batch), 200, "the batch to end")
        batch = client.batches.retrieve(batch.id)
        assert (batch.status, _done(client, batch)) == ("completed", LINES)
        output = source.with_name("out.jsonl")
        output.write_bytes(client.files.content(batch.output_file_id or "").read())
        check_answers(source, output)


def _done(client: openai.OpenAI, batch: Batch) -> int:
    found = client.batches.retrieve(batch.id).request_counts
    return 0 if found is None else found.completed


def _ended(client: openai.OpenAI, batch: Batch) -> bool:
    """A Redis that came back empty knows the batch once it is rebuilt."""
    try:
        return client.batches.retrieve(batch.id).status in END_STATES
    except openai.NotFoundError:
        return False


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_the_commands_of_the_page_run_a_batch(store: str, tmp_path: Path) -> None:
    """Those of `docs/deployment.md` in their order, with this machine's addresses."""
    source = examples(tmp_path / "requests.jsonl", 20)
    create, *services, submit = _page_commands()
    with ExitStack() as stack:
        server, port = stack.enter_context(running_server()), stack.enter_context(reserved_port())
        given = {"FILE_STORE": f"{store}/new", "REDIS_URL": server.url, "PIPELINE_PORT": str(port)}
        made = run_pipeline(*create, **given)
        assert made.returncode == 0, made.stderr
        for service in services:
            stack.enter_context(running_pipeline(*service, **given))
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: _answers(f"{url}/ready"), 240, "the model to be served")
        client = {"OPENAI_API_KEY": made.stdout.strip(), "OPENAI_BASE_URL": f"{url}/v1"}
        with running_pipeline(*submit, folder=tmp_path, **client) as batch:
            assert batch.wait(240) == 0, batch.output
    check_answers(source, tmp_path / "answers.jsonl")
    assert list_names(f"{given['FILE_STORE']}/batches")


def _page_commands() -> list[list[str]]:
    text = (REPOSITORY / "docs" / "deployment.md").read_text()
    section = text.partition("## A file store in a bucket\n")[2].partition("- **The bucket**")[0]
    return [line.split()[1:] for line in section.splitlines() if line.startswith("    pipeline ")]


def _answers(url: str) -> bool:
    try:
        return http_calls.get(url).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("read_only", r"bucket store cannot be used \(AccessDenied\): allow these credentials"),
        ("unconditional", r"bucket store has no conditional puts \(If-None-Match and If-Match\)"),
    ],
)
@pytest.mark.parametrize("command", ["api", "jobs", "serve"])
def test_a_bucket_that_cannot_be_used_is_refused(run_here: RunHere, command: str, fault: str, reason: str) -> None:
    with bucket() as remote:
        setattr(remote.server, fault, True)
        done = run_here(command, "--file-store", f"{remote.uri}/fleet", REDIS_URL="redis://127.0.0.1:1/0")
    assert done.code == 2
    assert re.search(reason, done.err)


def test_a_bucket_that_is_not_there_is_refused(run_here: RunHere) -> None:
    with bucket():
        done = run_here("jobs", "--file-store", "s3://other/fleet", REDIS_URL="redis://127.0.0.1:1/0")
    assert done.code == 2
    assert "there is no bucket other: make it, or name another" in done.err


def test_a_bucket_needs_a_redis_that_all_share(run_here: RunHere) -> None:
    with bucket() as remote:
        done = run_here("serve", "--file-store", remote.uri)
    assert done.code == 2
    assert "is a bucket and cannot be locked: set REDIS_URL" in done.err


@pytest.mark.proof
@pytest.mark.parametrize("command", ["api", "jobs", "serve"])
def test_a_bucket_of_a_fleet_with_another_redis_is_refused(run_here: RunHere, command: str) -> None:
    with (
        bucket() as remote,
        running_server() as first,
        running_server() as other,
        running_pipeline("jobs", "--file-store", remote.uri, redis_url=first.url) as jobs,
    ):
        wait_until(lambda: remote.server.get("store/owner"), 60, "the store to have an owner")
        started = remote.server.get("store/owner")
        wait_until(lambda: remote.server.get("store/owner") != started, 60, "a heartbeat")
        done = run_here(command, "--file-store", remote.uri, REDIS_URL=other.url, PIPELINE_PORT="0")
        assert jobs.process.poll() is None
    assert done.code == 1
    assert "is used by a fleet with another Redis: set REDIS_URL to that one, or name another prefix" in done.err


def test_keys_are_made_and_revoked_in_a_bucket(run_here: RunHere) -> None:
    with bucket() as remote:
        made = run_here("keys", "create", "--tenant", "t", FILE_STORE=f"{remote.uri}/fleet")
        assert (made.code, made.out.startswith("sk-")) == (0, True)
        [name] = [name for name in list_names(f"{remote.uri}/fleet/keys") if name.startswith("key_")]
        key_id = name.removesuffix(".json")
        assert key_id in run_here("keys", "list").out
        assert run_here("keys", "revoke", key_id).code == 0
        assert name not in list_names(f"{remote.uri}/fleet/keys")
