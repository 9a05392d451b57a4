"""`pipeline run-batch -` as a process of its own: lines run while the pipe is open, and nothing is
lost or doubled however it ends.
"""

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.piped.outstanding import MOST_LINES
from tests.pipeline.conftest import RunHere
from tests.pipeline.results import read_results
from tests.support.commands import REPOSITORY, command, command_environment
from tests.support.poison import Poison, poisoned_environment
from tests.support.processes import descendants, is_running
from tests.support.waiting import wait_until

_PIPE_BYTES = 1 << 16


class PipedCommand:
    """The command with both of its pipes in the test's hands."""

    def __init__(self, folder: Path, *flags: object, **environment: str) -> None:
        self._errors = (folder / f"stderr-{os.urandom(4).hex()}").open("w+b")
        self.process = subprocess.Popen(
            command("run-batch", "-", *flags),
            env=command_environment(None, environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            cwd=REPOSITORY,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout

    @property
    def stderr(self) -> str:
        """What it printed there so far."""
        return os.pread(self._errors.fileno(), 1 << 20, 0).decode()

    def write(self, *lines: bytes) -> None:
        self.stdin.write(b"".join(lines))
        self.stdin.flush()

    def read(self, count: int = 1) -> list[dict[str, Any]]:
        """Wait for so many answers."""
        return [json.loads(self.stdout.readline()) for _ in range(count)]

    def finish(self) -> list[dict[str, Any]]:
        """End the input; return the rest of the answers."""
        self.stdin.close()
        rest = [json.loads(line) for line in self.stdout]
        assert self.wait() == 0, self.stderr
        return rest

    def wait(self) -> int:
        wait_until(lambda: self.process.poll() is not None, 150, "the command to end")
        assert "Traceback" not in self.stderr, self.stderr
        return int(self.process.returncode)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for file in (self.stdin, self.stdout, self._errors):
            with contextlib.suppress(BrokenPipeError):
                file.close()


@contextlib.contextmanager
def piped(folder: Path, *flags: object, **environment: str) -> Iterator[PipedCommand]:
    run = PipedCommand(folder, *flags, **environment)
    try:
        yield run
    finally:
        run.close()


def request(custom_id: str, prompt: str = "Count to 3", **parameters: object) -> bytes:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, **parameters}
    line = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(line).encode() + b"\n"


def slow(custom_id: str, tokens: int) -> bytes:
    """A request of so many steps of at least 50 ms, where the environment says so."""
    return request(custom_id, "Please wait", max_tokens=tokens, ignore_eos=True)


def ids(results: list[dict[str, Any]]) -> list[str]:
    return [result["custom_id"] for result in results]


def test_lines_are_answered_while_the_pipe_is_open(tmp_path: Path) -> None:
    with piped(tmp_path) as run:
        for name in ("a", "b"):
            run.write(request(name))
            [answer] = run.read()
            assert (answer["custom_id"], answer["response"]["status_code"], answer["error"]) == (name, 200, None)
            assert answer["response"]["body"]["choices"][0]["text"]
        run.write(b'{"broken": \n')
        [answer] = run.read()
        assert (answer["custom_id"], answer["response"]["status_code"]) == (None, 400)
        assert answer["error"]["code"] == "invalid_json_line"
        assert answer["error"]["message"].startswith("Line 3: ")
        run.write(b"\n", request("unknown", model="other"), request("a"), request("c"))
        answers = {answer["custom_id"]: answer for answer in run.read(3)}
        assert answers["unknown"]["error"]["code"] == "model_not_found"
        assert answers["a"]["error"]["code"] == "duplicate_custom_id"
        assert answers["c"]["error"] is None
        run.write(request("without a line feed")[:-1])
        assert ids(run.finish()) == ["without a line feed"]
        assert run.stderr.splitlines()[-1].startswith("7 lines read, 7 answered, 3 failed; ")


def test_answers_leave_as_they_finish(tmp_path: Path) -> None:
    with piped(tmp_path, **poisoned_environment(Poison("wait", "slow"))) as run:
        run.write(slow("first", 60), *(request(f"{number}") for number in range(3)))
        assert {*ids(run.read(3))} == {"0", "1", "2"}
        assert ids(run.finish()) == ["first"]


def test_ordered_answers_leave_in_input_order(tmp_path: Path) -> None:
    environment = poisoned_environment(Poison("wait", "slow"))
    with piped(tmp_path, "--ordered", **environment) as run:
        lines = [slow("first", 20), *(request(f"{number}") for number in range(5))]
        run.write(*lines[:3], b"broken\n", *lines[3:])
        assert ids(run.finish()) == ["first", "0", "1", None, "2", "3", "4"]


@pytest.mark.parametrize("order", [signal.SIGINT, signal.SIGKILL])
def test_the_same_command_goes_on_with_its_file(tmp_path: Path, order: signal.Signals) -> None:
    """Half of the lines are slow; the input is sent again from its beginning."""
    output = tmp_path / "out.jsonl"
    environment = poisoned_environment(Poison("wait", "slow"))
    lines = [request(f"{number}", "Please wait" if number % 2 else "Go", max_tokens=60) for number in range(20)]
    with piped(tmp_path, "-o", output, "--max-num-seqs", 4, **environment) as run:
        run.write(*lines)
        wait_until(lambda: output.exists() and len(output.read_bytes().splitlines()) > 2, 150, "some answers")
        children = descendants(run.process.pid)
        run.process.send_signal(order)
        if order is signal.SIGINT:
            assert run.wait() == 130
            assert run.stderr.splitlines()[-1].startswith("Interrupted: 20 lines read, ")
            assert run.stderr.splitlines()[-1].endswith(" failed; run the same command again to go on.")
        run.process.wait()
        wait_until(lambda: not any(map(is_running, children)), 60, "the end of all processes")
    before = output.read_bytes()
    with output.open("ab") as file:
        file.write(lines[0][:30])
    with piped(tmp_path, "-o", output) as run:
        run.write(*lines, request("new"))
        assert run.finish() == []
    assert output.read_bytes().startswith(before[: before.rindex(b"\n") + 1])
    results = read_results(output)
    assert sorted(ids(results)) == sorted([*(f"{number}" for number in range(20)), "new"])
    assert all(result["error"] is None for result in results)
    assert len({result["id"] for result in results}) == 21


def test_ctrl_c_writes_what_has_finished(tmp_path: Path) -> None:
    with piped(tmp_path, **poisoned_environment(Poison("wait", "slow"))) as run:
        run.write(request("a"), slow("never", 1000))
        assert ids(run.read()) == ["a"]
        run.process.send_signal(signal.SIGINT)
        assert run.stdout.read() == b""
        assert run.wait() == 130
        assert run.stderr.splitlines()[-1] == "Interrupted: 2 lines read, 1 answered, 0 failed."


def test_a_closed_stdout_ends_it_quietly(tmp_path: Path) -> None:
    with piped(tmp_path) as run:
        run.write(request("a"))
        run.read()
        run.stdout.close()
        run.write(request("b"))
        assert run.wait() == 1
        assert "Error" not in run.stderr


def test_an_unread_stdout_stops_the_reading_of_stdin(tmp_path: Path) -> None:
    """Lines that need no model, each of which is answered by a line longer than itself."""
    total, broken = 4 * MOST_LINES, b"{" + b" " * 120 + b"\n"
    most = MOST_LINES + 2 * _PIPE_BYTES // len(broken) + _PIPE_BYTES // 64
    sent = [0]

    def send() -> None:
        for _ in range(total):
            run.write(broken)
            sent[0] += 1
        run.stdin.close()

    with piped(tmp_path) as run:
        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        wait_until(lambda: sent[0] >= MOST_LINES, 150, "lines that were read")
        for number in range(total):
            assert sent[0] - number <= most
            assert json.loads(run.stdout.readline())["error"]["message"].startswith(f"Line {number + 1}: ")
        assert run.stdout.read() == b""
        assert run.wait() == 0
        sender.join()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("a.jsonl", "--ordered"), "--ordered is for lines of stdin"),
        (("-", "a.jsonl"), "no other input can run beside it"),
        (("-", "--detach"), "--detach is for input files"),
        (("-", "--retry-failed"), "--retry-failed is for input files"),
        (("-", "--prompt-column", "text"), "--prompt-column is for input files"),
        (("-", "--template", "{text}"), "--template is for input files"),
        (("-", "--keep-columns", "a"), "--keep-columns is for input files"),
        (("-", "-o", "out.parquet"), "out.parquet names another format"),
        (("-", "--redis-url", "redis://localhost:1"), "run on this machine alone"),
    ],
)
def test_flags_that_do_not_fit_are_refused(run_here: RunHere, arguments: tuple[str, ...], said: str) -> None:
    done = run_here("run-batch", *arguments)
    assert done.code == 2
    [sentence] = [line for line in done.err.splitlines() if line.startswith("Error: ")]
    assert said in sentence


def test_a_file_of_others_is_left_alone(run_here: RunHere, tmp_path: Path) -> None:
    output = tmp_path / "notes.jsonl"
    output.write_text("not ours\n")
    done = run_here("run-batch", "-", "-o", output)
    assert done.code == 2
    assert "of no run that could go on" in done.err
    assert output.read_text() == "not ours\n"
    assert [path.name for path in tmp_path.iterdir()] == ["notes.jsonl"]


@pytest.mark.proof
def test_the_folder_of_a_file_is_not_taken_for_that_of_a_pipe(run_here: RunHere, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(request("of the file"))
    with piped(tmp_path, "-o", output) as run:
        run.write(request("of the pipe"))
        run.finish()
    before = output.read_bytes()
    done = run_here("run-batch", source, "-o", output)
    assert done.code == 2
    assert "was begun with lines that arrive, not with a file" in done.err
    assert output.read_bytes() == before


def test_a_closed_stdin_is_refused() -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&-', "sh", *command("run-batch", "-")],
        env=command_environment(None, {}),
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
    )
    assert done.returncode == 2
    assert "stdin or stdout is closed" in done.stderr
