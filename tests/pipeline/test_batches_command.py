"""`pipeline batches` against a real stack: HTTP, control plane, and a worker that answers what was
said.
"""

import gzip
import json
import re
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from api.settings import ApiSettings
from jobs.protocol.requests import Claim
from jobs.protocol.results import Result
from jobs.queue import keys
from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue
from pipeline.errors import Refused
from pipeline.remote_batches import endpoint_of
from pipeline.remote_tail import Printer
from tests.api.scripted_worker import ScriptedWorker
from tests.pipeline.conftest import CommandOutcome, RunHere
from tests.support.api_server import running_api
from tests.support.commands import REPOSITORY, command, running_pipeline
from tests.support.control_plane import (
    Answering,
    chat_line,
    check_echoes,
    control_plane,
    echo,
    failing,
    read_jsonl,
    write_input,
)
from tests.support.redis_server import running_server
from tests.support.relay import Relay
from tests.support.waiting import wait_until

Batches = Callable[..., CommandOutcome]


PIECES = ["one ", "two\nthree ", "four\n", "fi\u2028ve"]


class ScriptedApi:
    """Where the API is, the gate through which each answer of the model "slow" goes, and the worker
    of "talk", which gives `PIECES`.
    """

    def __init__(self, url: str, talker: ScriptedWorker, queue: Queue) -> None:
        self.url = f"{url}/v1"
        self.talker = talker
        self._queue = queue
        self.gate = threading.Semaphore(0)
        self.open = threading.Event()

    def answer(self, claim: Claim) -> Result:
        while not self.open.is_set() and self._is_wanted(claim) and not self.gate.acquire(timeout=0.02):
            pass
        return echo(claim)

    def _is_wanted(self, claim: Claim) -> bool:
        """Return whether the line is still there: that of a cancelled batch must not take the place
        in the gate of another test's.
        """
        return bool(self._queue.redis.hexists(keys.bodies(claim.key.batch), str(claim.key.line)))


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedApi]:
    store = str(tmp_path_factory.mktemp("store"))
    with (
        running_server() as server,
        control_plane(server.url, ["--file-store", store], {"FILE_STORE": store}),
        running_api(ApiSettings(redis_url=server.url, file_store=store, completion_windows=("24h", "2s"))) as url,
    ):
        talker = ScriptedWorker(Queue(connect(server.url)), lambda claim: PIECES, ("talk",))
        made = ScriptedApi(url, talker, Queue(connect(server.url)))
        with (
            talker,
            Answering(server.url),
            Answering(server.url, failing(2), ["unlucky"]),
            Answering(server.url, made.answer, ["slow"], limit=1),
        ):
            yield made
            made.open.set()


@pytest.fixture
def batches(run_here: RunHere, stack: ScriptedApi) -> Batches:
    """Runs `pipeline batches …`."""
    while stack.gate.acquire(blocking=False):  # left by another test
        pass
    return lambda *arguments: run_here("batches", *arguments, OPENAI_BASE_URL=stack.url)


def test_a_file_becomes_a_file_of_answers_in_one_command(batches: Batches, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.jsonl", 5)
    done = batches(
        "submit", source, "--wait", "-o", tmp_path / "out.jsonl", "--metadata", "run=7", "--metadata", "by=a=b"
    )
    assert done.code == 0, done.err
    check_echoes(tmp_path / "out.jsonl", 5)
    batch_id = done.out.split()[0]
    assert done.out.startswith(
        f"{batch_id} is completed; 5 requests, 0 failed; 35 prompt tokens (10 from the cache), 15 output tokens"
    )
    shown = json.loads(batches("get", batch_id, "--json").out)
    assert (shown["id"], shown["status"], shown["metadata"]) == (batch_id, "completed", {"run": "7", "by": "a=b"})
    assert "status             completed\n" in batches("get", batch_id).out
    assert "total_tokens 50, device_seconds 1.25\n" in batches("get", batch_id).out
    too_late = batches("cancel", batch_id)
    assert (too_late.code, too_late.err.count("\n")) == (2, 1)


def test_a_batch_is_made_now_and_fetched_later(
    batches: Batches, run_here: RunHere, stack: ScriptedApi, tmp_path: Path
) -> None:
    source = write_input(tmp_path / "in.jsonl", 3)
    file_id = run_here("files", "upload", source, OPENAI_BASE_URL=stack.url).out.strip()
    batch_id = batches("submit", file_id).out.strip()
    ended = batches("wait", batch_id, "--json")
    assert (ended.code, json.loads(ended.out)["status"]) == (0, "completed")
    assert batches("results", batch_id, "-o", tmp_path / "out.jsonl").code == 0
    check_echoes(tmp_path / "out.jsonl", 3)
    assert batches("results", batch_id).out.encode() == (tmp_path / "out.jsonl").read_bytes()
    assert batches("results", batch_id, "--errors").err == f"Error: no request of {batch_id} failed\n"
    listed = json.loads(batches("list", "--json", "--limit", 1).out)
    assert [batch["id"] for batch in listed] == [batch_id]
    assert batches("list").out.splitlines()[1].startswith(batch_id)


def test_a_batch_is_made_with_a_priority(batches: Batches, tmp_path: Path) -> None:
    batch_id = batches("submit", write_input(tmp_path / "in.jsonl", 1), "--priority", "-3").out.strip()
    assert "priority           -3\n" in batches("get", batch_id).out
    assert batches("wait", batch_id).code == 0


def test_every_bad_line_of_a_refused_file_is_listed(batches: Batches, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(chat_line("a") + b"{\n" + chat_line("a") + chat_line("b", model="unknown"))
    done = batches("submit", source, "--wait", "-o", tmp_path / "out.jsonl")
    assert done.code == 2
    for number, code in ((2, "invalid_json_line"), (3, "duplicate_custom_id"), (4, "model_not_found")):
        assert any(
            line.startswith(f"{source}:{number}: ") and line.endswith(f"[{code}]") for line in done.err.splitlines()
        ), done.err
    assert done.err.splitlines()[-1].endswith("was refused; nothing was run")
    assert not (tmp_path / "out.jsonl").exists()
    batch_id = done.err.splitlines()[-1].split()[1]
    assert ":2: " in batches("get", batch_id).err
    assert batches("results", batch_id).code == 2


def test_requests_are_appended_to_an_open_batch(batches: Batches, stack: ScriptedApi, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.jsonl", 3)
    batch_id = batches("open", "--metadata", "run=7").out.strip()
    assert re.findall("open, .*", batches("get", batch_id).out) == ["open, no append yet)"]
    assert batches("append", batch_id, source).out == "3 appended, 0 repeated, 0 refused\n"
    with source.open("ab") as file:
        file.write(b"{\n" + chat_line("c4", "say 4").rstrip())
    again = batches("append", batch_id, source)
    assert (again.code, again.out) == (2, "1 appended, 3 repeated, 1 refused\n")
    assert again.err.startswith(f"{source}:4: ")
    assert json.loads(batches("get", batch_id, "--json").out)["open"] is True
    since = re.compile(r"in_progress \(open, last append .*\d s ago\)")
    wait_until(lambda: since.search(batches("get", batch_id).out), 60, "the append in the state")
    assert since.search(batches("list", "--limit", 1).out)
    closed = batches("close", batch_id, "--wait", "-o", tmp_path / "out.jsonl")
    assert closed.code == 0, closed.err
    check_echoes(tmp_path / "out.jsonl", 4)
    assert batches("append", batch_id, source).code == 2
    assert batches("close", batch_id).code == 0
    ended = batches("get", batch_id).out
    assert re.search("^status +completed$", ended, re.MULTILINE)
    assert re.search("^open +no$", ended, re.MULTILINE)


def test_every_refused_line_is_counted(batches: Batches, tmp_path: Path) -> None:
    """Also those that the server does not list."""
    source, batch_id = tmp_path / "bad.jsonl", batches("open").out.strip()
    source.write_bytes(b"{\n\n" * 1003 + chat_line("good"))
    done = batches("append", batch_id, source)
    assert (done.code, done.out) == (2, "1 appended, 0 repeated, 1003 refused\n")


def test_a_pipe_is_appended_as_its_lines_come(batches: Batches, stack: ScriptedApi) -> None:
    batch_id = batches("open").out.strip()
    lines = [chat_line("c1", "say 1"), chat_line("c2", "say 2")]
    appending = subprocess.Popen(
        command("batches", "append", batch_id, "--base-url", stack.url, "--json"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=REPOSITORY,
    )
    assert appending.stdin is not None
    assert appending.stdout is not None
    appending.stdin.write(lines[0] + lines[1][:10])
    appending.stdin.flush()
    wait_until(lambda: total_of(batches, batch_id) == 1, 60, "the first line")
    appending.stdin.write(lines[1][10:])
    appending.stdin.close()
    assert appending.wait(60) == 0
    assert total_of(batches, batch_id) == 2
    assert batches("close", batch_id, "--wait").code == 0


def total_of(batches: Batches, batch_id: str) -> int:
    return int(json.loads(batches("get", batch_id, "--json").out)["request_counts"]["total"])


def test_answers_that_are_errors_can_fail_the_command(batches: Batches, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.jsonl", 3, model="unlucky")
    done = batches("submit", source, "--wait", "--fail-on-error")
    assert (done.code, done.err.splitlines()[-1]) == (1, "Error: 1 of 3 requests failed")
    batch_id = done.out.split()[0]
    assert [json.loads(line)["custom_id"] for line in batches("results", batch_id).out.splitlines()] == ["c1", "c3"]
    assert [json.loads(line)["custom_id"] for line in batches("results", batch_id, "--errors").out.splitlines()] == [
        "c2"
    ]
    assert batches("wait", batch_id).code == 0


def test_a_batch_that_runs_can_be_left_and_cancelled(batches: Batches, stack: ScriptedApi, tmp_path: Path) -> None:
    batch_id = batches("submit", write_input(tmp_path / "in.jsonl", 4, model="slow")).out.strip()
    assert batches("results", batch_id).code == 2
    with running_pipeline("batches", "wait", batch_id, "--base-url", stack.url) as waiting:
        stack.gate.release()
        waiting.wait_for("1 of 4 done")
        partial = batches("results", batch_id)
        assert (partial.code, partial.out.count("\n")) == (0, 1), partial.err
        assert "these are the answers so far" in partial.err
        waiting.process.send_signal(signal.SIGINT)
        assert waiting.wait() == 130
        assert f"{batch_id} goes on; come back with `pipeline batches wait {batch_id}`" in waiting.output
    cancelled = batches("cancel", batch_id)
    assert cancelled.code == 0, cancelled.err
    ended = batches("wait", batch_id, "-o", tmp_path / "out.jsonl")
    assert (ended.code, ended.err.splitlines()[-1]) == (1, f"Error: {batch_id} was cancelled before it was finished")
    assert len((tmp_path / "out.jsonl").read_bytes().splitlines()) == 1


def test_failed_lines_are_retried_and_batches_deleted(batches: Batches, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in.jsonl", 4, model="unlucky")
    first = batches("submit", source).out.strip()
    assert batches("wait", first).code == 0
    path = tmp_path / "again.jsonl"
    again = batches("retry", first, "--wait", "-o", path)
    assert again.code == 0, again.err
    assert [line["custom_id"] for line in read_jsonl(path)] == ["c2"]
    second = re.search(r"batch_\w+ is made", again.err)
    assert second is not None
    refused = batches("retry", second[0].split()[0])
    assert (refused.code, "there is nothing to retry" in refused.err) == (2, True)
    assert batches("retry", first, "-o", path).code == 2
    third = batches("retry", first).out.strip()
    assert batches("wait", third).code == 0
    assert json.loads(batches("get", third, "--json").out)["metadata"] == {"retry_of": first}
    completed = json.loads(batches("list", "--status", "completed", "--status", "failed", "--json").out)
    assert [one["id"] for one in completed][:3] == [third, second[0].split()[0], first]
    assert third not in batches("list", "--status", "failed").out
    assert batches("list", "--status", "done").code == 2
    assert batches("delete", first, third).out.splitlines() == [f"{first} is deleted", f"{third} is deleted"]
    assert batches("get", first).code == batches("delete", first).code == 2
    running = batches("submit", write_input(tmp_path / "slow.jsonl", 1, model="slow")).out.strip()
    refused = batches("delete", running)
    assert (refused.code, "cancel it first" in refused.err) == (2, True)
    assert batches("retry", running).code == 2
    batches("cancel", running)
    batches("wait", running)
    assert json.loads(batches("delete", running, "--json").out)["deleted"] is True


@pytest.fixture
def relay(stack: ScriptedApi) -> Iterator[Relay]:
    with Relay(stack.url) as relay:
        yield relay


def test_tokens_are_shown_as_they_come_each_once_through_a_cut(
    batches: Batches, stack: ScriptedApi, relay: Relay, tmp_path: Path
) -> None:
    stack.talker.step = threading.Semaphore(0)
    batch_id = batches("submit", write_input(tmp_path / "in.jsonl", 1, model="talk")).out.strip()
    with running_pipeline("batches", "tail", batch_id, "--base-url", relay.url) as tail:
        stack.talker.step.release(2)
        tail.wait_for("c1: one two\n")
        relay.cut()
        wait_until(lambda: relay.accepted > 1, 30, "the stream to be taken up again")
        stack.talker.step.release(2)
        assert tail.wait() == 0
        assert re.search(rb"\nlast-event-id: [0-9]+-[0-9]+\r\n", relay.received.lower())
        assert tail.output.split("\n") == [
            "c1: one two",
            "c1: three four",
            "c1: fi\u2028ve",
            f"{batch_id} is completed",
            "",
        ]


def test_lines_of_several_answers_keep_apart(capsys: pytest.CaptureFixture[str]) -> None:
    def event(line: int, *texts: tuple[int, int, str], status: str | None = None) -> dict[str, Any]:
        choices = [{"index": index, "text_offset": offset, "text": text} for index, offset, text in texts]
        return {"custom_id": f"c{line}", "line": line, "choices": choices, "status": status}

    printer = Printer()
    for value in (
        event(1, (0, 0, "a")),
        event(2, (0, 0, "x\ny")),
        event(1, (0, 0, "ab"), (1, 0, "B")),  # sent again from the beginning
        event(1, (0, 1, "bc\n"), status="completed"),
        event(2, status="failed"),
        event(1, (0, 0, "ab")),  # run again
        event(1, status="completed"),
    ):
        printer.show(value)
    assert capsys.readouterr().out.splitlines() == ["c2: x", "c1: abc", "c1 (1): B", "c2: y", "c2: failed", "c1: ab"]


def test_the_tokens_of_a_batch_that_ended_are_not_shown(batches: Batches, tmp_path: Path) -> None:
    batch_id = batches("submit", write_input(tmp_path / "in.jsonl", 1)).out.strip()
    assert batches("wait", batch_id).code == 0
    ended = batches("tail", batch_id, "--json")
    assert (ended.code, json.loads(ended.out)["status"]) == (0, "completed")


@pytest.mark.proof
def test_a_server_that_is_away_for_a_while_is_waited_for(
    batches: Batches, stack: ScriptedApi, relay: Relay, tmp_path: Path
) -> None:
    batch_id = batches("submit", write_input(tmp_path / "in.jsonl", 2, model="slow")).out.strip()
    with running_pipeline("batches", "wait", batch_id, "--base-url", relay.url) as waiting:
        stack.gate.release()
        waiting.wait_for("1 of 2 done")
        relay.is_away = True
        relay.cut()
        waiting.wait_for("the server does not answer yet")
        stack.gate.release()
        relay.is_away = False
        assert waiting.wait() == 0
        assert "2 requests, 0 failed" in waiting.output


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["tail", "batch_x"], "No batch found"),
        (["get", "batch_x"], "No batch found with id 'batch_x'"),
        (["wait", "batch_x"], "No batch found"),
        (["cancel", "batch_x"], "No batch found"),
        (["results", "batch_x"], "No batch found"),
        (["get", ""], "it is empty"),
        (["cancel", ".."], "'..' is no id"),
        (["get", "\udcff"], "cannot be sent"),
        (["submit", "{tmp}/in.jsonl", "--metadata", "a=\udcff"], "cannot be sent"),
        (["submit", "{tmp}/absent.jsonl"], "there is no file"),
        (["submit", "{tmp}"], "is a folder"),
        (["submit", "{tmp}/in.jsonl", "--endpoint", "/v1/responses"], "Supported values are"),
        (["submit", "{tmp}/in.jsonl", "--completion-window", "3h"], "completion_window"),
        (["submit", "{tmp}/in.jsonl", "--metadata", "x"], "is not KEY=VALUE"),
        (["submit", "{tmp}/in.jsonl", "--priority", "101"], "101 is not in the range -100<=x<=100"),
        (["submit", "{tmp}/in.jsonl", "-o", "x"], "need --wait"),
        (["submit", "{tmp}/bad.parquet"], "bad.parquet"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    batches: Batches, tmp_path: Path, arguments: list[str], reason: str
) -> None:
    write_input(tmp_path / "in.jsonl", 1)
    (tmp_path / "bad.parquet").write_bytes(b"x")
    code, _, stderr = batches(*(argument.format(tmp=tmp_path) for argument in arguments))
    assert code == 2, stderr
    assert stderr.splitlines()[-1].startswith("Error: ")
    assert reason in stderr


def test_a_batch_that_is_not_made_leaves_no_file(
    batches: Batches, run_here: RunHere, stack: ScriptedApi, tmp_path: Path
) -> None:
    before = run_here("files", "list", "--json", OPENAI_BASE_URL=stack.url).out
    assert batches("submit", write_input(tmp_path / "in.jsonl", 1), "--endpoint", "/v1/responses").code == 2
    assert run_here("files", "list", "--json", OPENAI_BASE_URL=stack.url).out == before


def test_the_commands_of_the_documentation(
    run_here: RunHere, stack: ScriptedApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_input(tmp_path / "requests.jsonl", 3, model="unlucky")
    monkeypatch.chdir(tmp_path)
    page = (REPOSITORY / "docs" / "command_line.md").read_text()
    commands = [
        line
        for block in re.findall(r"```bash\n(.*?)```", page, re.S)
        for line in block.splitlines()
        if "pipeline" in line and not line.startswith("eval ")  # run by bash in test_run_batch_pages.py
    ]
    assert len(commands) >= 11
    variables, key_id = {"BATCH": ""}, ""
    for line in commands:
        captured = re.fullmatch(r"(\w+)=\$\((.*)\)", line)
        words = [variables.get(word.removeprefix("$"), word) for word in shlex.split(captured[2] if captured else line)]
        words = [key_id if word.startswith("key_") else word for word in words]
        environment = {"FILE_STORE": str(tmp_path / "store"), "OPENAI_BASE_URL": stack.url}
        done = run_here(*words[1:], **environment)
        expected = {"--fail-on-error": 1, "cancel": 2}  # a line fails; the batch has ended
        assert done.code == next((code for word, code in expected.items() if word in words), 0), (line, done)
        if captured:
            variables[captured[1]] = done.out.strip()
        key_id = done.err.split()[0] if "create" in words else key_id
    assert (tmp_path / "results.jsonl").exists()


def test_the_endpoint_is_that_of_the_first_line(tmp_path: Path) -> None:
    line = b'\n{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}\n' + chat_line("b")
    (tmp_path / "plain.jsonl").write_bytes(b"\xef\xbb\xbf" + line)
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(line))
    (tmp_path / "packed.jsonl.zst").write_bytes(pyarrow.compress(line, "zstd", asbytes=True))
    parquet.write_table(pyarrow.table({"custom_id": ["a"], "prompt": ["x"]}), tmp_path / "rows.parquet")
    for name in ("plain.jsonl", "packed.jsonl.gz", "packed.jsonl.zst", "rows.parquet"):
        assert endpoint_of(tmp_path / name) == "/v1/completions", name
    for content in (b"", b"\n", b"{", b"[]", b'{"url": 1}'):
        (tmp_path / "odd.jsonl").write_bytes(content)
        assert endpoint_of(tmp_path / "odd.jsonl") is None
    (tmp_path / "bad.jsonl.gz").write_bytes(b"x")
    with pytest.raises(Refused, match="cannot be decompressed"):
        endpoint_of(tmp_path / "bad.jsonl.gz")
