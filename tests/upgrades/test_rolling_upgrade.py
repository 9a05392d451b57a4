"""Processes of the last version are replaced one by one while batches and live calls run."""

import json
import threading
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import pytest

from tests.pipeline.results import check_answers, examples
from tests.support.commands import run_pipeline, running_pipeline
from tests.support.integrity import faults
from tests.support.waiting import wait_until
from tests.upgrades.mixed_fleet import CHAT, FATAL, Client, MixedFleet, line, lines
from tests.upgrades.versions import code_of, unpack_previous

pytestmark = pytest.mark.proof


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack_previous(tmp_path_factory.mktemp("previous"))


@pytest.mark.parametrize("order", [("api", "jobs", "workers"), ("workers", "jobs", "api")], ids=" ".join)
def test_each_line_and_call_ends_once_while_processes_are_replaced(previous: Path, order: tuple[str, ...]) -> None:
    with TemporaryDirectory(prefix="upgrade-") as name, ExitStack() as stack:
        fleet = MixedFleet(Path(name), stack)
        try:
            upgrade = _Upgrade(fleet, previous)
            for part in order:
                upgrade.replace(part)
            upgrade.finish()
        except BaseException:
            print(fleet.logs())
            raise


def test_a_run_batch_of_the_last_version_is_resumed(previous: Path, tmp_path: Path) -> None:
    source, output = examples(tmp_path / "in.jsonl", 300), tmp_path / "out.jsonl"
    arguments = ("run-batch", source, "-o", output, "--dtype", "float32")
    with running_pipeline(*arguments, "--max-num-seqs", 8, **code_of(previous)) as command:
        wait_until(lambda: list(tmp_path.glob("out.jsonl.parts/parts/*")), 60, "lines on disk")
        command.process.kill()
    done = run_pipeline(*arguments)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    check_answers(source, output)


class _Upgrade:
    """A fleet at work that is replaced part by part."""

    def __init__(self, fleet: MixedFleet, previous: Path) -> None:
        self._fleet, self._previous = fleet, previous
        self._url = fleet.start_api("old-api", previous)
        fleet.start_jobs("old-jobs", previous)
        for name in ("old-worker-0", "old-worker-1"):
            fleet.start_worker(name, previous, "--max-num-seqs", 4)
        fleet.wait_serving("old-worker-0", "old-worker-1")
        self._client = Client(self._url)
        self._client.wait_ready()
        self._batches: list[str] = []
        self._callers: list[_Caller] = []
        self._submit()

    def replace(self, part: str) -> None:
        """Replace one part, with batches and calls that begin before it and go on after it."""
        self._submit()
        {"api": self._replace_api, "jobs": self._replace_jobs, "workers": self._replace_workers}[part]()
        self._check_callers()
        self._submit()

    def finish(self) -> None:
        """Check all that was submitted, at the end with processes of this version alone."""
        for batch in self._batches:
            self._client.wait_completed(batch)
        self._check_callers()
        assert faults(self._fleet.client) == []
        self._fleet.stop("api", "worker-0", "worker-1", "jobs")
        assert self._fleet.tracebacks() == {}

    def _submit(self) -> None:
        """Add a batch of which some lines are done and some are not, and calls that stream."""
        name = f"batch-{len(self._batches)}"
        batch = self._client.create(name, [*lines(f"{name}-short", 20, 10), *lines(f"{name}-long", 30, 300)])
        self._batches.append(batch)
        self._callers += [_Caller(self._url, name, tokens) for tokens in (40, 600)]
        wait_until(lambda: self._client.batch(batch)["request_counts"]["completed"] > 0, 60, "some lines to be done")

    def _check_callers(self) -> None:
        """Wait for the calls made so far, whose streams are kept for some minutes."""
        while self._callers:
            self._callers.pop().check(self._client)

    def _stop(self, name: str) -> None:
        """End a process of the last version, while a batch runs."""
        self._client.check_views()
        while not any(self._client.batch(batch)["status"] == "in_progress" for batch in self._batches):
            self._submit()
        self._fleet.stop(name)

    def _replace_api(self) -> None:
        """Start the new one, lead clients to it, and end the old one."""
        self._url = self._fleet.start_api("api")
        self._client = Client(self._url)
        self._client.wait_ready()
        self._submit()
        self._stop("old-api")

    def _replace_jobs(self) -> None:
        self._fleet.start_jobs("jobs")
        self._submit()
        self._submit()
        self._stop("old-jobs")

    def _replace_workers(self) -> None:
        """Start new ones while requests are in quarantine, and end the old ones."""
        self._batches.append(self._client.create("fatal", [*lines(FATAL, 3, 10), *lines("beside-fatal", 10, 300)]))
        wait_until(
            lambda: sum(self._fleet.queue.depths(["demo"]).quarantined.values()) > 0, 60, "requests in quarantine"
        )
        for number in range(2):
            self._fleet.start_worker(f"worker-{number}", None, "--max-num-seqs", 4)
            self._fleet.wait_serving(f"worker-{number}")
            self._submit()
            self._stop(f"old-worker-{number}")


class _Caller:
    """A live call that streams, in a thread of its own."""

    def __init__(self, url: str, name: str, tokens: int) -> None:
        self._url, self._tokens = url, tokens
        self._body = json.loads(line(name, tokens))["body"] | {"stream": True}
        self._stream: str | None = None
        self._text, self._ended = "", False
        self._thread = threading.Thread(target=self._call, daemon=True)
        self._thread.start()

    def check(self, client: Client) -> None:
        """The stream holds the whole answer, and the call brought it as far as its API process."""
        self._thread.join(60)
        assert self._stream is not None
        text, last = client.read_stream(self._stream)
        assert last["status"] == 200
        assert last["response"]["usage"]["completion_tokens"] == self._tokens
        assert text == self._text if self._ended else text.startswith(self._text)

    def _call(self) -> None:
        while not self._is_answered():
            pass

    def _is_answered(self) -> bool:
        """Call; return False for a 503, which the API gives while every worker starts its core
        anew.
        """
        try:
            with httpx.stream("POST", f"{self._url}{CHAT}", json=self._body, timeout=60) as answer:
                if answer.status_code == 503:
                    return False
                assert answer.status_code == 200, answer.read()
                self._stream = answer.headers["x-stream-id"]
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                        self._text += choice["delta"].get("content") or ""
                        self._ended = self._ended or choice["finish_reason"] is not None
        except httpx.TransportError:
            pass
        return True
