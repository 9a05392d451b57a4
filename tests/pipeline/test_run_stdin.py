"""`pipeline run-batch -` as a process of its own: lines run while the pipe is open, and nothing is
lost or doubled however it ends.
"""

import contextlib
import fcntl
import io
import json
import os
import re
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from jobs.batch.manifest import NAME, BatchSpec, Manifest, load_manifest, save_manifest
from jobs.batch.open_requests import SOURCE_NAME
from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue
from pipeline.held_folder import RUN_LOCK
from pipeline.piped.outstanding import MOST_LINES
from tests.pipeline.conftest import RunHere
from tests.pipeline.results import read_results
from tests.support.commands import REPOSITORY, command, command_environment
from tests.support.poison import Poison, held, poisoned_environment
from tests.support.processes import descendants, is_running
from tests.support.waiting import wait_until

pytestmark = pytest.mark.proof

_PIPE_BYTES = 1 << 16


class PipedCommand:
    """The command with both of its pipes in the test's hands."""

    def __init__(self, folder: Path, *flags: object, stdout: int = subprocess.PIPE, **environment: str) -> None:
        self._errors = (folder / f"stderr-{os.urandom(4).hex()}").open("w+b")
        self.process = subprocess.Popen(
            command("run-batch", "-", *flags),
            env=command_environment(None, environment),
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=self._errors,
            cwd=REPOSITORY,
        )
        assert self.process.stdin is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout or io.BytesIO()

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
def piped(folder: Path, *flags: object, stdout: int = subprocess.PIPE, **environment: str) -> Iterator[PipedCommand]:
    run = PipedCommand(folder, *flags, stdout=stdout, **environment)
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
    hold = tmp_path / "hold"
    poisons = Poison("wait", "slow"), Poison("wait", "hold", start=60)
    with piped(tmp_path, **poisoned_environment(*poisons, hold=hold)) as run:
        with held(hold):
            run.write(slow("first", 80), *(request(f"{number}") for number in range(3)))
            assert {*ids(run.read(3))} == {"0", "1", "2"}
        assert ids(run.finish()) == ["first"]


def test_ordered_answers_leave_in_input_order(tmp_path: Path) -> None:
    environment = poisoned_environment(Poison("wait", "slow"))
    with piped(tmp_path, "--ordered", **environment) as run:
        lines = [slow("first", 20), *(request(f"{number}") for number in range(5))]
        run.write(*lines[:3], b"broken\n", *lines[3:])
        assert ids(run.finish()) == ["first", "0", "1", None, "2", "3", "4"]


@pytest.mark.parametrize("order", [pytest.param(signal.SIGINT), signal.SIGKILL])
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


def test_lines_that_are_sent_again_count_as_they_were_answered(tmp_path: Path) -> None:
    flags = ("-o", tmp_path / "out.jsonl", "--fail-on-error")
    for _ in range(2):
        with piped(tmp_path, *flags) as run:
            run.write(request("good"), request("unknown", model="other"), b"broken\n")
            run.stdin.close()
            assert run.wait() == 1
            counted, reason = run.stderr.splitlines()[-2:]
            assert counted.startswith("3 lines read, 3 answered, 2 failed; ")
            assert reason.endswith("2 of 3 requests failed")
    assert len(read_results(tmp_path / "out.jsonl")) == 3


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


def test_a_reader_that_leaves_ends_the_run_though_nothing_is_written(tmp_path: Path) -> None:
    """As `head -1` does: the input stays open, and no answer comes that could not be written."""
    with piped(tmp_path) as run:
        run.write(request("a"))
        run.read()
        run.stdout.close()
        assert run.wait() == 1
        assert "Error" not in run.stderr


def test_a_reader_that_has_all_may_leave_before_the_input_ends(tmp_path: Path) -> None:
    with piped(tmp_path) as run:
        run.write(request("a"))
        run.read()
        run.stdout.close()
        run.stdin.close()
        assert run.wait() == 0


def test_a_full_disk_behind_stdout_promises_no_later_run(tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full, piped(tmp_path, stdout=full.fileno()) as run:
        run.write(b"broken\n")
        assert run.wait() == 1
        assert run.stderr.splitlines()[-1] == (
            "Error: cannot write stdout: No space left on device; the answers so far are on stdout, and nothing else is"
            " kept"
        )


def test_a_stdout_that_does_not_wait_gets_whole_lines(tmp_path: Path) -> None:
    """More of them than its pipe holds come before the first is read."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    total = _PIPE_BYTES // 64
    with os.fdopen(reader, "rb") as answers, piped(tmp_path, stdout=writer) as run:
        os.close(writer)
        run.write(*[b"broken\n"] * total)
        run.stdin.close()
        wait_until(lambda: _bytes_in(answers) > _PIPE_BYTES - 4096, 150, "a full pipe")
        numbers = [json.loads(line)["error"]["message"].split(":")[0] for line in answers]
        assert numbers == [f"Line {number}" for number in range(1, total + 1)]
        assert run.wait() == 0


def _bytes_in(pipe: IO[bytes]) -> int:
    return int.from_bytes(fcntl.ioctl(pipe.fileno(), termios.FIONREAD, bytes(4)), sys.byteorder)


def test_errors_of_duplicates_are_written_once_by_the_run_that_first_has_them(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    lines = [request("a"), request("a"), b"broken\n", request("a", "Else"), request("b")]
    for count in (1, 3, 5, 5):
        with piped(tmp_path, "-o", output) as run:
            run.write(*lines[:count])
            run.finish()
    answers = [(str(answer["custom_id"]), answer["response"]["status_code"]) for answer in read_results(output)]
    assert answers[0] == ("a", 200)
    assert sorted(answers) == [("None", 400), ("a", 200), ("a", 400), ("a", 400), ("b", 200)]


def test_an_emptied_output_gets_all_answers_again(tmp_path: Path) -> None:
    """More of them than may be outstanding."""
    output, total = tmp_path / "out.jsonl", MOST_LINES + 500
    bad = request("<number>", temperature="warm").split(b"<number>")
    with piped(tmp_path, "-o", output) as run:
        run.write(request("good"), *((b"%d" % number).join(bad) for number in range(total)))
        run.finish()
    before = read_results(output)
    output.write_bytes(b"")
    with piped(tmp_path, "-o", output, "--ordered") as run:
        run.finish()
    after = read_results(output)
    assert ids(after) == ["good", *(f"{number}" for number in range(total))]
    assert sorted(line["id"] for line in before) == sorted(line["id"] for line in after)


def test_a_damaged_part_ends_the_run_and_the_next_one_mends_it(tmp_path: Path) -> None:
    """Answers wait on disk for that of the first line, and are damaged there meanwhile."""
    output, hold = tmp_path / "out.jsonl", tmp_path / "hold"
    environment = poisoned_environment(Poison("wait", "hold", start=200), hold=hold)
    lines = [slow("first", 220), *(request(f"{number}") for number in range(5))]
    with piped(tmp_path, "-o", output, "--ordered", **environment) as run:
        with held(hold):
            run.write(*lines)
            wait_until(lambda: _drained(run, output) == 5, 150, "answers on disk")
            for part in (output.with_name("out.jsonl.parts") / "parts").iterdir():
                part.write_bytes(bytes(part.stat().st_size))
        assert run.wait() == 1
        end = run.stderr.splitlines()[-1]
        assert end.startswith("Error: the answer of line 2 of batch_")
        assert " is damaged at line 0" in end
        assert end.endswith("; finished results are kept, run the same command again to go on")
    assert ids(read_results(output)) == ["first"]
    with piped(tmp_path, "-o", output, "--ordered") as run:
        run.finish()
    assert ids(read_results(output)) == ["first", *(f"{number}" for number in range(5))]


def _drained(run: PipedCommand, output: Path) -> int:
    """How many lines are on disk alone."""
    manifest = load_manifest(str(output.with_name("out.jsonl.parts")))
    found = re.search(r"REDIS_URL=(\S+)", run.stderr)
    if manifest is None or found is None or not manifest.parts:
        return 0
    with connect(found[1]) as client:
        undrained = Queue(client).undrained_lines(manifest.batch_id)
    return sum(part.lines for part in manifest.parts) - undrained


def test_a_line_with_an_error_of_the_server_gets_a_new_answer(tmp_path: Path) -> None:
    output, lines = tmp_path / "out.jsonl", [request("good"), request("bad", "Please wait")]
    with piped(tmp_path, "-o", output, **poisoned_environment(Poison("wait", "exit"))) as run:
        run.write(*lines)
        run.finish()
    failed = [line for line in read_results(output) if line["error"] is not None]
    assert [(line["custom_id"], line["response"]["status_code"]) for line in failed] == [("bad", 500)]
    for _ in range(2):
        with piped(tmp_path, "-o", output) as run:
            run.write(*lines)
            run.finish()
    results = read_results(output)
    assert sorted(ids(results)) == ["bad", "bad", "good"]
    assert (results[-1]["custom_id"], results[-1]["response"]["status_code"]) == ("bad", 200)
    assert results[-1]["id"] == failed[0]["id"]


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
    assert "no run that wrote it can be resumed" in done.err
    assert output.read_text() == "not ours\n"
    assert [path.name for path in tmp_path.iterdir()] == ["notes.jsonl"]


@pytest.mark.parametrize("content", ["not ours\n", "not ours, and without a line feed"])
def test_a_folder_of_another_run_vouches_for_no_file(run_here: RunHere, tmp_path: Path, content: str) -> None:
    output, root = tmp_path / "notes.jsonl", tmp_path / "notes.jsonl.parts"
    output.write_text(content)
    root.mkdir()
    spec = BatchSpec(input=str(root / SOURCE_NAME), root=str(root), streams_input=True)
    for manifest in (None, Manifest(batch_id="batch_0a", created_at=1.0, spec=spec)):
        if manifest is not None:
            save_manifest(manifest)
        done = run_here("run-batch", "-", "-o", output)
        assert done.code == 2
        [sentence] = [line for line in done.err.splitlines() if line.startswith("Error: ")]
        assert "has lines of another run" in sentence
        assert output.read_text() == content


@pytest.mark.parametrize("of_a_pipe", [True, False])
def test_another_kind_of_input_is_refused_before_any_result_is_on_disk(
    run_here: RunHere, tmp_path: Path, of_a_pipe: bool
) -> None:
    """Those of the run before may be in the output alone."""
    source, output, root = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "out.jsonl.parts"
    source.write_bytes(request("a"))
    root.mkdir()
    spec = BatchSpec(input=str(source), root=str(root), streams_input=of_a_pipe)
    save_manifest(Manifest(batch_id="batch_0a", created_at=1.0, spec=spec))
    done = run_here("run-batch", source if of_a_pipe else "-", "-o", output)
    assert done.code == 2
    kinds = ("lines that arrive", "a file") if of_a_pipe else ("a file", "lines that arrive")
    assert "was begun with {}, not with {}".format(*kinds) in done.err
    assert {path.name for path in root.iterdir()} - {RUN_LOCK, ".lock"} == {NAME}


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
