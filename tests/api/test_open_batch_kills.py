"""Kill rounds with an open batch: whatever dies while requests are appended and answered, each that
was acknowledged has one answer.
"""

import contextlib
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import redis

from jobs.batch.line_index import INDEX_NAME
from jobs.batch.open_requests import SOURCE_NAME
from jobs.batch.plan import PLAN_NAME
from jobs.store.storage import is_local
from tests.support import http_calls
from tests.support.commands import REPOSITORY, command, command_environment
from tests.support.control_plane import Answering, ControlPlane
from tests.support.object_stores import PLACES, cloud
from tests.support.ports import reserved_port
from tests.support.redis_machine import RedisMachine, running_redis_machine
from tests.support.seaweedfs import seaweedfs
from tests.support.waiting import wait_until

_PRODUCER = """
import sys, time
from pathlib import Path
import httpx
from tests.support.control_plane import chat_line
url, name, note, groups, size = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
done = note.read_text().count("\\n") if note.exists() else 0
client = httpx.Client(base_url=url, timeout=60)
with note.open("a") as file:
    for group in range(max(0, done - 1), groups):  # the last one again, as after a kill before its answer
        ids = [f"{name}{number}" for number in range(group * size, (group + 1) * size)]
        content = b"".join(chat_line(one, f"say {one}") for one in ids)
        while True:
            try:
                answer = client.post(f"/v1/batches/{sys.argv[6]}/requests", content=content)
            except httpx.TransportError:
                time.sleep(0.05)
                continue
            if answer.status_code == 200:
                break
            assert answer.status_code >= 500, answer.text
            time.sleep(0.05)
        found = answer.json()
        assert (found["appended"] + found["repeated"], found["errors"]) == (size, []), found
        if group >= done:
            file.write(" ".join(ids) + "\\n")
            file.flush()
"""


class AppendStack:
    """The processes around one open batch, each of which can be killed and started again."""

    def __init__(self, folder: Path, store: str, machine: RedisMachine, port: int, groups: int) -> None:
        self.store = store
        self.machine = machine
        self.url = f"http://127.0.0.1:{port}"
        self.plane = ControlPlane(machine.url, ("--file-store", store), {"FILE_STORE": store})
        self.batch = ""
        self._notes = [folder / f"acknowledged-{name}" for name in "xy"]
        self._groups = groups
        self._api = command("api", "--port", port, "--file-store", self.store)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        if name == "api":
            arguments = self._api
        else:
            note = next(note for note in self._notes if note.name.endswith(name))
            size = 7 if name == "x" else 40
            words = [self.url, name, note, self._groups, size, self.batch]
            arguments = [sys.executable, "-c", _PRODUCER, *map(str, words)]
        environment = command_environment(self.machine.url, {"REDIS_RETRY_SECONDS": "2"})
        self.processes[name] = subprocess.Popen(arguments, cwd=REPOSITORY, env=environment)

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def restart(self, name: str) -> None:
        self.kill(name)
        self.start(name)

    def restart_plane(self, *names: str) -> None:
        for name in names:
            self.plane.kill(name)
        self.plane.start()

    def restart_redis(self) -> None:
        self.machine.kill()
        self.machine.start()

    def empty_redis(self) -> None:
        self.machine.lose_everything()
        self.machine.start()

    def cut_power(self) -> None:
        """All die at once; Redis has lost its last moment, and in a folder some bytes are left of
        what was written and not made durable.
        """
        on_disk = self.machine.on_disk()
        for name in ("driver", "twin", "ticker"):
            self.plane.kill(name)
        self.kill("api")
        self.machine.lose_power(on_disk)
        for name in (SOURCE_NAME, PLAN_NAME, INDEX_NAME) if is_local(self.store) else ():
            with Path(self.store, "batches", self.batch, name).open("ab") as file:
                file.write(b'{"custom_id": "torn\0')
        self.machine.start()
        self.start("api")
        self.plane.start()

    @property
    def producing(self) -> list[str]:
        """The producers that have not appended all."""
        return [name for name in "xy" if self.processes[name].poll() is None]

    def acknowledged(self) -> list[str]:
        return [one for note in self._notes if note.exists() for one in note.read_text().split()]

    def call(self, method: str, path: str, **options: object) -> httpx.Response:
        """Ask until the API answers."""

        def ask() -> httpx.Response | None:
            with contextlib.suppress(httpx.TransportError):
                answer = httpx.request(method, f"{self.url}{path}", timeout=60, **options)  # type: ignore[arg-type]
                return answer if answer.status_code < 500 else None
            return None

        return wait_until(ask, 120, f"an answer to {method} {path}")

    def stop(self) -> None:
        for process in [*self.processes.values(), *self.plane.processes.values()]:
            process.kill()
            process.wait()


@contextlib.contextmanager
def running(folder: Path, store: str, groups: int) -> Iterator[AppendStack]:
    """With two producers that have begun to append."""
    with running_redis_machine() as machine, reserved_port() as port:
        stack = AppendStack(folder, store, machine, port, groups)
        try:
            with Answering(machine.url, limit=16, pause=0.005):
                stack.start("api")
                stack.plane.start()
                wait_until(lambda: serves(stack), 120, "the API to know the model")
                body = {"input": "stream", "endpoint": "/v1/chat/completions", "completion_window": "24h"}
                stack.batch = stack.call("POST", "/v1/batches", json=body).json()["id"]
                stack.start("x")
                stack.start("y")
                yield stack
        finally:
            stack.stop()


def serves(stack: AppendStack) -> bool:
    with contextlib.suppress(httpx.TransportError, redis.RedisError):
        return bool(http_calls.get(f"{stack.url}/v1/models").json().get("data"))
    return False


@pytest.fixture(params=[*PLACES, "az"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A file store in a folder, in a bucket of SeaweedFS, and in a container of Azurite."""
    if request.param == "folder":
        yield str(tmp_path / "store")
        return
    (tmp_path / "seaweedfs").mkdir()
    with cloud("az") if request.param == "az" else seaweedfs(tmp_path / "seaweedfs") as uri:
        yield uri


@pytest.mark.proof
@pytest.mark.timeout(900)
def test_every_acknowledged_request_has_one_answer_whatever_dies(tmp_path: Path, store: str, seed: int) -> None:
    draw, groups = random.Random(seed), 150
    with running(tmp_path, store, groups) as stack:
        kinds: dict[str, Callable[[], None]] = {
            "producer": lambda: stack.restart(draw.choice(stack.producing or ["x", "y"])),
            "api": lambda: stack.restart("api"),
            "driver": lambda: stack.restart_plane("driver"),
            "control plane": lambda: stack.restart_plane("driver", "twin", "ticker"),
            "redis": stack.restart_redis,
            "empty redis": stack.empty_redis,
            "power": stack.cut_power,
        }
        deck: list[str] = []
        done: list[str] = []
        while stack.producing or set(done) != set(kinds):
            known = len(stack.acknowledged())
            wait_until(lambda known=known: len(stack.acknowledged()) > known or not stack.producing, 120, "progress")
            time.sleep(draw.random() / 2)  # the moment of the kill
            deck = deck or draw.sample(sorted(kinds), len(kinds))
            done.append(deck.pop())
            print(f"{len(stack.acknowledged())} acknowledged; {done[-1]} dies", flush=True)
            kinds[done[-1]]()
        assert [stack.processes[name].returncode for name in "xy"] == [0, 0]
        acknowledged = stack.acknowledged()
        assert len(acknowledged) == len(set(acknowledged)) == groups * 47
        path = f"/v1/batches/{stack.batch}"
        assert stack.call("GET", path).json()["open"] is True
        assert stack.call("POST", f"{path}/close").json()["open"] is False
        batch = wait_until(
            lambda: (found := stack.call("GET", path).json())["status"] == "completed" and found, 240, "the end"
        )
        assert batch["request_counts"] == {"total": len(acknowledged), "completed": len(acknowledged), "failed": 0}
        content = stack.call("GET", f"/v1/files/{batch['output_file_id']}/content").content
        answers = [json.loads(line) for line in content.splitlines()]
        assert sorted(answer["custom_id"] for answer in answers) == sorted(acknowledged)
        for answer in answers:
            said = answer["response"]["body"]["choices"][0]["message"]["content"]
            assert said == f"say {answer['custom_id']}"
        appended = stack.call("GET", f"/v1/files/{batch['input_file_id']}/content").content
        assert [json.loads(line)["custom_id"] for line in appended.splitlines()] == [
            answer["custom_id"] for answer in answers
        ]
