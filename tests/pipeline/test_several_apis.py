"""`pipeline serve --api-server-count 2`, over TLS and with JSON logs: calls spread over both API
processes, and the end of one touches no call of the other.
"""

import json
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.pipeline.conftest import RunHere
from tests.support.certificates import Certificates, make_certificates
from tests.support.commands import RunningCommand, running_pipeline
from tests.support.poison import Poison, poisoned_environment
from tests.support.processes import command_line, descendants
from tests.support.waiting import wait_until

pytestmark = pytest.mark.proof

STREAMS = 8
BODY = {"model": "demo", "prompt": "a tortoise", "max_tokens": 1900, "stream": True, "ignore_eos": True}


class TwoApis:
    """The command, its address and the files of its TLS."""

    def __init__(self, command: RunningCommand, url: str, files: Certificates) -> None:
        self.command = command
        self.url = url
        self.context = files.client_context()
        self.files = files

    def apis(self) -> list[int]:
        """The ids of the API processes."""
        return [pid for pid in descendants(self.command.process.pid) if "pipeline api" in command_line(pid)]

    def records(self, logger: str) -> list[dict[str, Any]]:
        """What a logger wrote so far; every line of the output has to be JSON."""
        lines = [json.loads(line) for line in self.command.output.splitlines()]
        return [line for line in lines if line["logger"] == logger]

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, verify=self.context, timeout=120)

    def process_of(self, answer: httpx.Response) -> int:
        """The process at the other end of a connection."""
        client_port = answer.extensions["network_stream"].get_extra_info("client_addr")[1]
        for pid in self.apis():
            if any(one.raddr and one.raddr.port == client_port for one in psutil.Process(pid).net_connections("tcp")):
                return pid
        raise AssertionError(f"no process has the connection from port {client_port}")

    def next_process(self) -> int:
        """The process that answers one more connection."""
        with self.client() as client, client.stream("GET", "/health") as answer:
            return self.process_of(answer)

    def both_answer(self) -> bool:
        """Whether each of two connections has a process of its own."""
        with self.client() as client, client.stream("GET", "/health") as answer:
            return self.process_of(answer) != self.next_process()

    @contextmanager
    def stream(self) -> Iterator[tuple[int, Iterator[str]]]:
        """A call on a connection of its own: the process that answers it, and the lines."""
        with self.client() as client, client.stream("POST", "/v1/completions", json=BODY) as answer:
            assert answer.status_code == 200
            yield self.process_of(answer), answer.iter_lines()


def text_of(lines: Iterator[str]) -> str:
    """The text of the next chunk of a stream that goes on."""
    line = next(line for line in lines if line)
    choice = json.loads(line.removeprefix("data: "))["choices"][0]
    assert choice["finish_reason"] is None
    return str(choice["text"])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoApis]:
    folder = tmp_path_factory.mktemp("served")
    files = make_certificates(folder / "tls")
    flags = ("--port", 0, "--api-server-count", 2, "--log-format", "json", "--served-model-name", "demo")
    tls = ("--ssl-certfile", files.certificate, "--ssl-keyfile", files.key)
    slow = poisoned_environment(Poison("tortoise", "slow"))  # what `BODY` asks for
    with running_pipeline("serve", *flags, *tls, "--file-store", folder / "store", **slow) as command:
        command.wait_for("listening on https")
        url = re.search(r"listening on (https://127\.0\.0\.1:\d+)", command.output)
        assert url is not None
        served = TwoApis(command, url[1], files)
        with served.client() as client:
            wait_until(lambda: client.get("/ready").status_code == 200, 120, "the model to be served")
        wait_until(served.both_answer, 120, "both processes to answer")
        yield served


def test_the_end_of_one_touches_no_call_of_the_other(served: TwoApis) -> None:
    before = served.apis()
    assert len(before) == 2
    with ExitStack() as stack:
        streams: list[tuple[int, Iterator[str]]] = []

        def are_spread() -> bool:
            streams.append(stack.enter_context(served.stream()))
            spread = Counter(pid for pid, _ in streams)
            assert set(spread) <= set(before)
            return len(streams) >= STREAMS and min(spread[pid] for pid in before) >= STREAMS // 4

        # A process that was held up for a while has the fewest streams, and gets the next ones
        wait_until(are_spread, 60, "streams of both processes")
        victim = before[0]
        os.kill(victim, signal.SIGKILL)
        for pid, lines in streams:
            if pid == victim:
                with pytest.raises(httpx.RemoteProtocolError):
                    list(lines)
            else:
                for _ in range(20):
                    text_of(lines)
        with served.client() as client:
            assert client.get("/v1/models").status_code == 200
        wait_until(lambda: len(served.apis()) == 2 and served.apis() != before, 120, "its successor")
        (successor,) = set(served.apis()) - set(before)
        # It has the fewest connections as soon as it accepts any
        wait_until(lambda: served.next_process() == successor, 120, "its successor to answer")


def test_a_call_waits_while_no_process_is_there(served: TwoApis) -> None:
    """The supervisor keeps listening."""
    for pid in served.apis():
        os.kill(pid, signal.SIGKILL)
    with served.client() as client:
        assert client.get("/v1/models").status_code == 200


def test_each_process_answers_the_same_metrics(served: TwoApis) -> None:
    """All of them are counted in Redis; none is of a process."""
    wait_until(served.both_answer, 120, "both processes to answer")
    found: dict[int, set[str]] = {}
    with ExitStack() as stack:

        def both_are_read() -> bool:
            client = stack.enter_context(served.client())
            with client.stream("GET", "/metrics") as answer:
                names = {line.split("{")[0].split(" ")[0] for line in answer.iter_lines() if not line.startswith("#")}
                found[served.process_of(answer)] = names
            return len(found) == 2

        # A process that was held up for a while has the fewest connections, and gets the next ones
        wait_until(both_are_read, 60, "an answer of each process")
    assert len({frozenset(names) for names in found.values()}) == 1
    assert "pipeline_generated_tokens_total" in next(iter(found.values()))


def test_every_line_of_the_log_is_json_and_names_its_process(served: TwoApis) -> None:
    with served.client() as client:
        client.get("/v1/models", headers={"x-request-id": "own-id"})
    wait_until(lambda: "own-id" in served.command.output, 60, "the access log")
    [line] = [line for line in served.records("api.http.access_log") if line["request_id"] == "own-id"]
    assert line["process"] in ("api-0", "api-1")
    assert (line["level"], line["method"], line["path"], line["status"]) == ("INFO", "GET", "/v1/models", 200)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", line["time"])
    assert {line["process"] for line in served.records("api.main")} == {"api-0", "api-1"}
    os.kill(served.apis()[0], signal.SIGKILL)
    wait_until(lambda: "was killed by SIGKILL" in served.command.output, 60, "its end to be logged")
    assert any("was killed by SIGKILL" in line["message"] for line in served.records("supervisor"))


def test_our_own_clients_speak_tls(served: TwoApis, tmp_path: Path, run_here: RunHere) -> None:
    port = served.url.rpartition(":")[2]
    source = tmp_path / "requests.jsonl"
    body = {"model": "demo", "prompt": "x", "max_tokens": 2}
    source.write_text(json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}) + "\n")
    server = {"OPENAI_BASE_URL": f"https://localhost:{port}/v1"}
    refused = run_here("files", "list", **server)
    assert refused.code == 1
    assert "certificate verify failed" in refused.err
    server["SSL_CERT_FILE"] = served.files.authority
    done = run_here("batches", "submit", source, "--wait", "-o", tmp_path / "results.jsonl", **server)
    assert done.code == 0, done.err
    assert json.loads((tmp_path / "results.jsonl").read_text())["custom_id"] == "a"
    probe = ("health", "api", "--port", port, "--ssl-certfile", served.files.certificate)
    asked = run_here(*probe, "--ssl-keyfile", served.files.key)
    assert (asked.code, asked.err) == (0, "")
