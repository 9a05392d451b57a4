"""`python -m tests.upgrades.make_fixture`: writes `fixture/` anew, by processes of the version
before.

A fleet of that version gets batches until there is one in every state, and two live calls. Then
everything is stopped at one moment, copied and killed. That moment may be missed: run it again.

Once a version is released, set `PREVIOUS` of `versions.py` to it, and run this.

- `store/` is the file store.
- `redis.jsonl` holds the commands of the append-only file, one a line, as JSON with bytes read as
  Latin-1. Any server takes them.
- `expected.json` says when that was, and what has to come of each batch and call.

`@folder@` replaces the path of the folder that holds the store.
"""

import json
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx

from jobs.queue import keys
from jobs.queue.connection import connect
from tests.support.commands import command_environment, run_pipeline
from tests.support.fleet import Member
from tests.support.ports import reserved_port
from tests.support.processes import descendants, send_all
from tests.support.redis_machine import RedisMachine
from tests.support.waiting import wait_until
from tests.upgrades.mixed_fleet import CHAT, line, lines
from tests.upgrades.versions import code_of, unpack_previous

FIXTURE = Path(__file__).parent / "fixture"
MARK = b"@folder@"
ENDS = {
    "validating": "completed",
    "in_progress": "completed",
    "finalizing": "completed",
    "cancelling": "cancelled",
    "completed": "completed",
    "failed": "failed",
    "cancelled": "cancelled",
    "expired": "expired",
}
_MODEL_FLAGS = ("--dtype", "float32", "--max-num-seqs", "4")


def main() -> None:
    """Make the fleet, stop it in the right moment, write the fixture."""
    with tempfile.TemporaryDirectory(prefix="old-") as name, ExitStack() as stack:
        folder = Path(name)
        (folder / "tree").mkdir()
        fleet = OldFleet(folder, unpack_previous(folder / "tree"), stack)
        expected = fleet.fill()
        shutil.rmtree(FIXTURE, ignore_errors=True)
        (FIXTURE / "store").mkdir(parents=True)
        (FIXTURE / "redis.jsonl").write_text("".join(json.dumps(command) + "\n" for command in fleet.commands()))
        copy_files(folder, FIXTURE / "store")
        (FIXTURE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    check_nothing_of_this_machine(folder)


def copy_files(folder: Path, target: Path) -> None:
    """Copy the files of the store, with the mark for the path of the folder."""
    for path in (folder / "store").rglob("*"):
        if path.is_file():
            copy = target / path.relative_to(folder / "store")
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes().replace(bytes(folder), MARK))


def check_nothing_of_this_machine(folder: Path) -> None:
    """Fail where the fixture names a folder of it."""
    for path in FIXTURE.rglob("*"):
        found = path.read_bytes() if path.is_file() else b""
        for place in (folder, Path.cwd(), Path.home()):
            assert bytes(place) not in found, f"{path} names {place}"


class OldFleet:
    """Processes of the version before, each a command of its own."""

    def __init__(self, folder: Path, tree: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self.store = folder / "store"
        self._redis = RedisMachine(folder / "redis")
        self._redis.start()
        stack.callback(self._redis.stop)
        self._client = connect(self._redis.url)
        (folder / "sitecustomize.py").write_text("import socket\nsocket.gethostname = lambda: 'host'\n")
        code = {**code_of(tree), "PYTHONPATH": f"{folder}:{tree}"}
        self._environment = command_environment(self._redis.url, {**code, "LEASE_SECONDS": "2"})
        self._members: list[Member] = []
        stack.callback(self._kill)
        port = stack.enter_context(reserved_port())
        key = run_pipeline("keys", "create", "--name", "upgrade", "--file-store", self.store, **code)
        self._secret = key.stdout.strip()
        headers = {"authorization": f"Bearer {self._secret}"}
        self._api = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, headers=headers))
        windows = ("--completion-window", "24h", "--completion-window", "3s")
        self._start("api", "--port", port, "--file-store", self.store, *windows)
        self._jobs = self._start("jobs", "--file-store", self.store)
        self._worker = self._start("worker", *_MODEL_FLAGS, "--stream-interval", 0.05)

    def fill(self) -> dict[str, Any]:
        """Bring batches into every state, stop everything, return what has to come of them."""
        wait_until(self._is_ready, 120, "the fleet to be ready")
        batches = {
            "completed": self._create("completed", [*lines("completed", 3, 8), line("too-long", 10**6)]),
            "failed": self._create("failed", ["{no JSON"]),
            "expired": self._create("expired", lines("expired", 6, 1900), window="3s"),
            "cancelled": self._create("cancelled", lines("cancelled", 5, 500)),
        }
        wait_until(lambda: self._batch(batches["cancelled"])["status"] == "in_progress", 60, "its lines to run")
        self._cancel(batches["cancelled"])
        for state, batch in batches.items():
            wait_until(lambda state=state, batch=batch: self._batch(batch)["status"] == state, 60, state)
        send_all(self._worker_pids(), signal.SIGSTOP)
        batches |= {
            "finalizing": self._create("finalizing", lines("finalizing", 3, 60)),
            "cancelling": self._create("cancelling", lines("cancelling", 3, 1900)),
            "in_progress": self._create("in_progress", lines("in_progress", 24, 120)),
        }
        for state in ("finalizing", "cancelling", "in_progress"):
            wait_until(
                lambda state=state: self._batch(batches[state])["status"] == "in_progress", 60, f"{state} to run"
            )
        self._without_long_jobs()
        self._cancel(batches["cancelling"])
        batches["validating"] = self._create("validating", lines("validating", 4, 8))
        running = self._call("Count the running call", 1200)
        send_all(self._worker_pids(), signal.SIGCONT)
        wait_until(lambda: self._state(batches["finalizing"]) == "finalizing", 60, "a batch to wait for its end")
        wait_until(lambda: self._is_under_way(batches["in_progress"]), 60, "lines done, leased and ready")
        send_all(self._worker_pids(), signal.SIGSTOP)
        waiting = self._call("Count the waiting call", 16)
        send_all([pid for member in self._members for pid in (member.pid, *descendants(member.pid))], signal.SIGSTOP)
        states = {state: self._state(batch) for state, batch in batches.items()}
        assert states == {state: state for state in ENDS}, states
        assert self._is_under_way(batches["in_progress"])
        assert self._client.hexists(keys.LEASE, f"{running}/0")
        assert not self._client.hexists(keys.LEASE, f"{waiting}/0")
        return {
            "seconds": self._client.time()[0],
            "secret": self._secret,
            "batches": {state: {"id": batches[state], "ends": end} for state, end in ENDS.items()},
            "live": {"running": running, "waiting": waiting},
        }

    def commands(self) -> Iterator[list[str]]:
        """What makes another server hold the same."""
        self._client.config_set("aof-use-rdb-preamble", "no")
        self._client.bgrewriteaof()
        wait_until(lambda: not self._client.info("persistence")["aof_rewrite_in_progress"], 60, "the file")
        (path,) = (path for path in self._redis.on_disk() if path.name.endswith(".base.aof"))
        for command in parse_commands(path.read_bytes()):
            yield [argument.replace(bytes(self._folder), MARK).decode("latin-1") for argument in command]

    def _start(self, name: str, *arguments: object) -> Member:
        member = Member(name, (name, *arguments), self._environment, self._folder / f"{name}.log")
        self._members.append(member)
        return member

    def _without_long_jobs(self) -> None:
        """Kill the process that validates and finalizes, and let nothing start it again."""
        (bulk,) = self._jobs.below("--queue bulk")
        send_all([self._jobs.pid], signal.SIGSTOP)
        send_all([bulk], signal.SIGKILL)

    def _kill(self) -> None:
        send_all([pid for member in self._members for pid in (*descendants(member.pid), member.pid)], signal.SIGKILL)

    def _worker_pids(self) -> list[int]:
        return [self._worker.pid, *descendants(self._worker.pid)]

    def _is_ready(self) -> bool:
        try:
            return bool(self._api.get("/health").json().get("models"))
        except httpx.TransportError:
            return False

    def _create(self, name: str, requests: list[str], window: str = "24h") -> str:
        content = "".join(request + "\n" for request in requests).encode()
        files = {"file": (f"{name}.jsonl", content)}
        file = self._api.post("/v1/files", data={"purpose": "batch"}, files=files).raise_for_status().json()
        body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": window, "metadata": {"name": name}}
        return str(self._api.post("/v1/batches", json=body).raise_for_status().json()["id"])

    def _batch(self, batch: str) -> dict[str, Any]:
        found: dict[str, Any] = self._api.get(f"/v1/batches/{batch}").raise_for_status().json()
        return found

    def _cancel(self, batch: str) -> None:
        self._api.post(f"/v1/batches/{batch}/cancel").raise_for_status()

    def _state(self, batch: str) -> str:
        return str((self._client.hget(keys.batch(batch), "state") or b"").decode())

    def _is_under_way(self, batch: str) -> bool:
        """Whether the batch has lines on disk, finished, leased and waiting."""
        leased = [name for name in self._client.hkeys(keys.LEASE) if name.startswith(batch.encode())]
        ready = self._client.llen(keys.ready(batch, "demo"))
        return bool(leased) and ready > 0 and bool(self._client.exists(keys.parts(batch)))

    def _call(self, content: str, tokens: int) -> str:
        """Make a live call from a thread, and return its name in Redis."""
        before = set(self._live_calls())
        body = json.loads(line("live", tokens, content))["body"] | {"stream": True}
        threading.Thread(target=self._send, args=(body,), daemon=True).start()
        return wait_until(lambda: next(iter(set(self._live_calls()) - before), None), 60, "the call to arrive") or ""

    def _send(self, body: dict[str, Any]) -> None:
        with suppress(httpx.TransportError), self._api.stream("POST", CHAT, json=body) as answer:
            for _ in answer.iter_lines():
                pass

    def _live_calls(self) -> list[str]:
        return [name.decode().rpartition(":")[2] for name in self._client.keys(keys.bodies("live_*"))]


def parse_commands(log: bytes) -> Iterator[list[bytes]]:
    """Read an append-only file without a preamble."""
    position = 0

    def number() -> int:
        nonlocal position
        end = log.index(b"\r\n", position)
        value, position = int(log[position + 1 : end]), end + 2
        return value

    def argument() -> bytes:
        nonlocal position
        size = number()
        value, position = log[position : position + size], position + size + 2
        return value

    while position < len(log):
        if log[position : position + 1] == b"#":  # a note of the time
            position = log.index(b"\r\n", position) + 2
            continue
        yield [argument() for _ in range(number())]


if __name__ == "__main__":
    main()
