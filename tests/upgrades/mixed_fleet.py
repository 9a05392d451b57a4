"""A fleet whose processes are of this version or of the last one, and what its API says."""

import json
import signal
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue
from jobs.queue.settings import QueueSettings
from tests.support.commands import command_environment
from tests.support.fleet import Member
from tests.support.poison import Poison, poisoned_environment
from tests.support.ports import reserved_port
from tests.support.processes import catches
from tests.support.redis_machine import RedisMachine
from tests.support.waiting import wait_until
from tests.upgrades.versions import code_of

LEASE_SECONDS = 2.0
CHAT = "/v1/chat/completions"
FATAL = "wombat"
"""The word of a request at which the engine core exits."""


class MixedFleet:
    """Processes over one Redis and one file store."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self._stack = folder, stack
        self.store = folder / "store"
        self.redis = RedisMachine(folder / "redis")
        self.redis.start()
        stack.callback(self.redis.stop)
        self.client = connect(self.redis.url)
        self.queue = Queue(self.client, QueueSettings(lease_seconds=LEASE_SECONDS))
        self.members: dict[str, Member] = {}
        stack.callback(self._kill)

    def start_api(self, name: str, tree: Path | None = None) -> str:
        """Start an API process, of the version in `tree` or of this one; return its address."""
        port = self._stack.enter_context(reserved_port())
        self._start(name, tree, "api", "--port", port, "--file-store", self.store)
        return f"http://127.0.0.1:{port}"

    def start_jobs(self, name: str, tree: Path | None = None) -> None:
        """Start a control plane."""
        self._start(name, tree, "jobs", "--file-store", self.store)

    def start_worker(self, name: str, tree: Path | None = None, *flags: object) -> None:
        """Start a worker of the demo model."""
        precise = ("--dtype", "float32", "--stream-interval", 0.1, "--shutdown-timeout", 1)
        self._start(name, tree, "worker", *precise, *flags)

    def wait_serving(self, *names: str) -> None:
        """Wait until these workers take requests."""
        pids = {self.members[name].pid for name in names}
        ready = lambda: {worker.pid for worker in self.queue.workers() if worker.state == "ready"}  # noqa: E731
        wait_until(lambda: ready() >= pids, 120, f"{names} to be ready")

    def stop(self, *names: str) -> None:
        """End processes in order, once they can be."""
        for name in names:
            member = self.members[name]
            wait_until(lambda pid=member.pid: catches(pid, signal.SIGTERM), 60, f"{name} to be up")  # type: ignore[misc]
            assert member.stop() == 0, member.log

    def tracebacks(self) -> dict[str, str]:
        """Return the logs of processes that show one."""
        return {name: member.log for name, member in self.members.items() if "Traceback" in member.log}

    def logs(self) -> str:
        """Return what all processes printed."""
        return "\n".join(f"--- {name}\n{member.log}" for name, member in self.members.items())

    def _start(self, name: str, tree: Path | None, *arguments: object) -> None:
        with_path = {} if tree is None else code_of(tree)
        environment = command_environment(self.redis.url, {"LEASE_SECONDS": str(LEASE_SECONDS), **with_path})
        environment |= poisoned_environment(Poison(FATAL, "exit"), path=with_path.get("PYTHONPATH"))
        self.members[name] = Member(name, arguments, environment, self.folder / f"{name}.log")

    def _kill(self) -> None:
        for member in self.members.values():
            member.send(signal.SIGKILL)
        for member in self.members.values():
            wait_until(lambda member=member: not member.is_running, 60, f"the end of {member.name}")  # type: ignore[misc]


class Client:
    """What is asked of an API process."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._http = httpx.Client(base_url=url, timeout=60)

    def wait_ready(self) -> None:
        """Wait until it answers."""
        wait_until(self._answers, 60, f"{self._url} to answer")

    def create(self, name: str, requests: Iterable[str]) -> str:
        """Make a batch of these lines; return its id."""
        files = {"file": (f"{name}.jsonl", "".join(f"{request}\n" for request in requests).encode())}
        file = self._http.post("/v1/files", data={"purpose": "batch"}, files=files).raise_for_status().json()
        body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
        return str(self._http.post("/v1/batches", json=body).raise_for_status().json()["id"])

    def batch(self, batch: str) -> dict[str, Any]:
        """Return the batch."""
        found: dict[str, Any] = self._http.get(f"/v1/batches/{batch}").raise_for_status().json()
        return found

    def wait_completed(self, batch: str) -> None:
        """Wait for the end of the batch; check that each of its lines has its answer once, and each
        fatal one its error.
        """
        wait_until(lambda: self.batch(batch)["status"] == "completed", 120, f"{batch} to be completed")
        record = self.batch(batch)
        inputs, outputs = self._lines(record["input_file_id"]), self._lines(record["output_file_id"])
        fatal = [row["custom_id"] for row in inputs if FATAL in row["custom_id"]]
        asked = [(row["custom_id"], row["body"]["max_tokens"]) for row in inputs if FATAL not in row["custom_id"]]
        given = [(row["custom_id"], row["response"]["body"]["usage"]["completion_tokens"]) for row in outputs]
        assert given == asked
        errors = self._lines(record["error_file_id"]) if fatal else []
        assert [row["custom_id"] for row in errors] == fatal
        assert {row["response"]["body"]["error"]["code"] for row in errors} <= {"engine_crashed"}
        counts = {"total": len(inputs), "completed": len(asked), "failed": len(fatal)}
        assert record["request_counts"] == counts

    def answer_lengths(self, batch: str) -> list[int]:
        """Return the tokens of each answer of a completed batch."""
        outputs = self._lines(self.batch(batch)["output_file_id"])
        return [row["response"]["body"]["usage"]["completion_tokens"] for row in outputs]

    def check_views(self) -> None:
        """Check that it shows the fleet, whatever the versions of its processes."""
        for path in ("/health", "/metrics", "/v1/models"):
            wait_until(lambda path=path: self._http.get(path).status_code == 200, 60, f"{path} to be shown")

    def read_stream(self, name: str) -> tuple[str, dict[str, Any]]:
        """Read the stream of a live call to its end: its text, without gaps, and the last event."""
        text, last = "", {}
        with self._http.stream("GET", f"/v1/streams/{name}") as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                last = json.loads(line.removeprefix("data: ")) if line.startswith("data: {") else last
                for choice in last.get("choices", []) if line.startswith("data: {") else []:
                    assert choice["text_offset"] == len(text)
                    text += choice["text"]
        return text, last

    def _answers(self) -> bool:
        try:
            return self._http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def _lines(self, file: str) -> list[dict[str, Any]]:
        content = self._http.get(f"/v1/files/{file}/content").raise_for_status().content
        return [json.loads(line) for line in content.splitlines()]


def line(custom_id: str, tokens: int) -> str:
    """A line that is answered with exactly so many tokens."""
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": f"Count {custom_id}"}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
    }
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body})


def lines(name: str, count: int, tokens: int) -> list[str]:
    """As many of them."""
    return [line(f"{name}-{number}", tokens) for number in range(count)]
