"""`pipeline run-batch` as a whole: private Redis, control plane, worker, engine, and the files that
remain.
"""

import contextlib
import json
import os
import re
import signal
import tempfile
from pathlib import Path

import pytest
from pyarrow import Table, parquet

from jobs.batch.manifest import NAME, BatchSpec, Manifest, load_manifest, save_manifest
from jobs.batch.parts import merge_parts
from pipeline import batch_start
from pipeline.batch_task import Task
from pipeline.held_folder import RUN_LOCK, held
from tests.pipeline.conftest import RunHere
from tests.pipeline.results import answers, check_answers, custom_ids, examples, read_results
from tests.support.commands import EXAMPLES, RunningCommand, run_pipeline, running_pipeline
from tests.support.control_plane import chat_line
from tests.support.poison import Poison, poisoned_environment
from tests.support.processes import command_line, descendants, is_running
from tests.support.slow_file import slow_reading
from tests.support.waiting import wait_until

LINES = 14


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str, str]:
    """One finished run of the last examples, two of which ask for structure: input, output, stdout,
    stderr.
    """
    folder = tmp_path_factory.mktemp("finished")
    source, output = examples(folder / "requests.jsonl", LINES, 302 - LINES), folder / "requests.results.jsonl"
    done = run_pipeline("run-batch", source)
    assert done.returncode == 0, done.stderr
    return source, output, done.stdout, done.stderr


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_every_line_is_answered_rightly_in_input_order(finished: tuple[Path, Path, str, str]) -> None:
    source, output, _, _ = finished
    check_answers(source, output)
    body = read_results(output)[0]["response"]["body"]
    assert body["object"] == "chat.completion"
    assert body["model"] == "demo"
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + body["usage"]["completion_tokens"]


def test_the_end_says_where_the_results_are_and_what_they_took(finished: tuple[Path, Path, str, str]) -> None:
    source, output, stdout, _ = finished
    lines = stdout.splitlines()
    assert [line.split(":")[0].strip() for line in lines[:3]] == custom_ids(source)[:3]
    assert lines[3] == f"results: {output}"
    assert f"{LINES} requests, 0 failed" in lines[4]
    assert "output tokens/s" in lines[4]


def test_one_line_of_the_log_says_what_runs(finished: tuple[Path, Path, str, str]) -> None:
    [logged] = [line for line in finished[3].splitlines() if " INFO " in line and "generated" not in line]
    assert re.search(r"worker INFO ready after [\d.]+ s as \S+: demo on cpu, computes in b?float\d+; ", logged)
    assert "Traceback" not in finished[3]


def test_nothing_but_the_output_and_a_note_remains(finished: tuple[Path, Path, str, str]) -> None:
    source, output, _, _ = finished
    assert names_in(source.parent) == [f".{output.name}.completed", "requests.jsonl", output.name]


def test_a_finished_run_is_not_run_again(finished: tuple[Path, Path, str, str], run_here: RunHere) -> None:
    source, output, _, _ = finished
    before = output.read_bytes()
    done = run_here("run-batch", source)
    assert (done.code, done.err) == (0, "")
    assert f"results: {output}\n{LINES} requests, 0 failed; complete before, nothing was run" in done.out
    assert output.read_bytes() == before
    assert not (source.parent / f"{output.name}.parts").exists()


def test_a_changed_input_is_refused_with_the_way_out(finished: tuple[Path, Path, str, str], run_here: RunHere) -> None:
    source, output, _, _ = finished
    before, results = source.read_bytes(), output.read_bytes()
    try:
        source.write_bytes(before.replace(custom_ids(source)[0].encode(), b"another", 1))
        done = run_here("run-batch", source)
    finally:
        source.write_bytes(before)
    assert done.code == 2
    last = done.err.splitlines()[-1]
    assert "has changed" in last
    assert "remove that file, or name another output" in last
    assert output.read_bytes() == results


def test_an_output_that_was_changed_is_left_as_it_is(finished: tuple[Path, Path, str, str], run_here: RunHere) -> None:
    source, output, _, _ = finished
    whole, stat = output.read_bytes(), output.stat()
    half = whole[: len(whole) // 2]
    try:
        output.write_bytes(half)
        done = run_here("run-batch", source)
        assert (done.code, output.read_bytes()) == (2, half)
    finally:
        output.write_bytes(whole)
        os.utime(output, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert f"{output} has changed since the run completed it; remove that file" in done.err


def test_another_flag_is_refused_with_the_way_out(finished: tuple[Path, Path, str, str], run_here: RunHere) -> None:
    source, output, _, _ = finished
    done = run_here("run-batch", source, "--seed", 4)
    assert done.code == 2
    assert f"{output} was begun with seed 0, not 4; remove that file, or name another output" in done.err


@pytest.mark.proof
def test_a_finished_run_whose_output_was_removed_is_run_anew(tmp_path: Path) -> None:
    source, output = tmp_path / "empty.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"")
    identities = set()
    for _ in range(2):
        assert run_pipeline("run-batch", source, "-o", output).returncode == 0
        identities.add(json.loads((tmp_path / ".out.jsonl.completed").read_text())["manifest"]["batch_id"])
        output.unlink()
    assert len(identities) == 2


@pytest.mark.proof
def test_the_folder_of_a_complete_run_is_kept_where_that_is_asked_for(tmp_path: Path) -> None:
    source, output = tmp_path / "empty.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"")
    assert run_pipeline("run-batch", source, "-o", output, "--keep-parts").returncode == 0
    assert names_in(tmp_path) == ["empty.jsonl", "out.jsonl", "out.jsonl.parts"]
    assert run_pipeline("run-batch", source, "-o", output).returncode == 0
    assert names_in(tmp_path) == [".out.jsonl.completed", "empty.jsonl", "out.jsonl"]
    again = run_pipeline("run-batch", source, "-o", output, "--keep-parts")
    assert "nothing was run; there is no folder to keep any more" in again.stdout


@pytest.mark.proof
@pytest.mark.parametrize("flags", [(), ("--keep-parts",)])
def test_a_run_that_another_one_has_completed_since_is_not_run_again(
    tmp_path: Path, run_here: RunHere, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    """Between its look for a note and its lock."""
    source, output = tmp_path / "empty.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"")
    hold_folder = batch_start.batch_folder

    def hold_too_late(task: Task) -> contextlib.AbstractContextManager[None]:
        assert run_pipeline("run-batch", source, "-o", output).returncode == 0
        return hold_folder(task)

    monkeypatch.setattr(batch_start, "batch_folder", hold_too_late)
    done = run_here("run-batch", source, "-o", output, *flags)
    assert (done.code, "0 requests, 0 failed; complete before, nothing was run" in done.out) == (0, True), done
    assert names_in(tmp_path) == [".out.jsonl.completed", "empty.jsonl", "out.jsonl"]


@pytest.mark.proof
def test_errors_in_a_body_are_answers_and_can_be_retried(tmp_path: Path) -> None:
    source, output = tmp_path / "requests.jsonl", tmp_path / "out.jsonl"
    message = {"role": "user", "content": "How much is 2 plus 3?"}
    bodies = [
        {"messages": [message], "max_tokens": 5},
        {"messages": [message], "temperature": -1},
        {"messages": [message], "max_tokens": 5, "an_unknown_parameter": [1]},
        {"messages": [{"role": "user", "content": "word " * 5000}]},
        {"prompt": "x", "max_tokens": 3, "ignore_eos": True},
    ]
    rows = [
        {
            "custom_id": f"line {number}",
            "method": "POST",
            "url": "/v1/chat/completions" if "messages" in body else "/v1/completions",
            "body": {"model": "demo", "temperature": 0, **body},
        }
        for number, body in enumerate(bodies)
    ]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run_pipeline("run-batch", source, "-o", output, "--fail-on-error")
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1] == "Error: 2 of 5 requests failed"
    results = read_results(output)
    assert [result["custom_id"] for result in results] == [row["custom_id"] for row in rows]
    assert [result["response"]["status_code"] for result in results] == [200, 400, 200, 400, 200]
    assert results[1]["response"]["body"]["error"]["param"] == "temperature"
    assert results[3]["response"]["body"]["error"]["code"] == "context_length_exceeded"
    assert results[0]["error"] is None
    assert results[4]["response"]["body"]["object"] == "text_completion"
    assert results[4]["response"]["body"]["usage"]["completion_tokens"] == 3
    assert results[1]["error"]["message"] == results[1]["response"]["body"]["error"]["message"]

    skipped = run_pipeline("run-batch", source, "-o", output)
    assert skipped.returncode == 0
    assert "ready after" not in skipped.stderr
    again = run_pipeline("run-batch", source, "-o", output, "--retry-failed")
    assert again.returncode == 0, again.stderr
    assert "ready after" in again.stderr
    assert [result["response"]["status_code"] for result in read_results(output)] == [200, 400, 200, 400, 200]
    assert read_results(output)[0] == results[0]


@pytest.mark.proof
def test_parquet_in_gives_parquet_out(tmp_path: Path) -> None:
    source = tmp_path / "requests.parquet"
    columns = {"custom_id": ["a", "b"], "prompt": ["Count", "Spell"], "max_tokens": [1, 6], "temperature": [0.0, 0.0]}
    parquet.write_table(Table.from_pydict(columns), source)
    done = run_pipeline("run-batch", source)
    assert done.returncode == 0, done.stderr
    table = parquet.read_table(tmp_path / "requests.results.parquet").to_pylist()
    assert [row["custom_id"] for row in table] == ["a", "b"]
    assert table[0]["completion_tokens"] == 1
    assert 1 <= table[1]["completion_tokens"] <= 6
    assert all(row["status_code"] == 200 and row["text"] is not None for row in table)


@pytest.mark.proof
def test_ctrl_c_keeps_what_is_finished_and_a_second_start_goes_on(tmp_path: Path) -> None:
    """Short and long answers, two at a time and slowly: some are finished soon, and not all for
    half a minute.
    """
    source, output, lengths = (
        tmp_path / "requests.jsonl",
        tmp_path / "out.jsonl",
        {name: len(text) for name, text in answers().items()},
    )
    questions = EXAMPLES.read_text().splitlines()[: len(lengths)]
    lines = sorted(questions, key=lambda line: lengths[json.loads(line)["custom_id"]])
    source.write_text("\n".join(lines[:10] + lines[-10:]) + "\n")
    flags = ("run-batch", source, "-o", output, "--max-num-seqs", 2)
    with running_pipeline(*flags, **poisoned_environment(Poison("", "slow"))) as run:
        wait_until(lambda: list(tmp_path.glob("out.jsonl.parts/parts/*")), 60, "a first part")
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130
        assert (
            run.output.splitlines()[-1]
            == "Interrupted: finished results are kept, run the same command again to go on."
        )
        assert "Traceback" not in run.output
    assert not output.exists()
    kept = kept_ids(tmp_path / "out.jsonl.parts")
    assert 0 < len(kept) < 20
    done = run_pipeline("run-batch", source, "-o", output)
    assert done.returncode == 0, done.stderr
    check_answers(source, output)
    assert f"{len(kept)} of 20 done; waiting for the model to load" in done.stderr.splitlines()
    results = dict(enumerate(read_results(output), start=1))
    assert {line: results[line]["response"]["body"]["id"] for line in kept} == kept


def kept_ids(root: Path) -> dict[int, str]:
    """By line, the ids of the answers that the parts of a run hold; an answer that is made again
    gets another.
    """
    manifest = load_manifest(str(root))
    assert manifest is not None
    return {record.line: json.loads(record.result.body)["id"] for record in merge_parts(str(root), manifest.parts)}


def endless(path: Path) -> Path:
    """A file that is not answered before a test has done what it wants to do meanwhile."""
    body = {"model": "demo", "prompt": "x", "max_tokens": 1900, "ignore_eos": True}
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body} for number in range(100)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.proof
def test_a_second_ctrl_c_ends_at_once_and_leaves_no_process_and_no_folder(tmp_path: Path) -> None:
    source = endless(tmp_path / "requests.jsonl")
    private = tmp_path / "tmp"
    private.mkdir()
    with running_pipeline("run-batch", source, "--max-num-seqs", 2, TMPDIR=str(private)) as run:
        run.wait_for("running")
        children = all_children(run)
        second = run_pipeline("run-batch", source)
        assert second.returncode == 2
        assert "another run is at work on" in second.stderr
        run.process.send_signal(signal.SIGINT)
        run.wait_for("press Ctrl-C again to stop at once")
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130
        wait_until(lambda: not any(is_running(pid) for pid in children), 60, "all children to end")
    assert list(private.iterdir()) == []


@pytest.mark.proof
def test_a_killed_run_leaves_no_process_and_the_next_one_removes_its_folder(tmp_path: Path) -> None:
    source = endless(tmp_path / "requests.jsonl")
    private = Path(tempfile.mkdtemp(prefix="t"))
    with running_pipeline("run-batch", source, "--max-num-seqs", 2, TMPDIR=str(private)) as run:
        run.wait_for("running")
        children = all_children(run)
        run.process.kill()
        run.wait()
        wait_until(lambda: not any(is_running(pid) for pid in children), 60, "all children to die with it")
    assert len(list(private.iterdir())) == 1
    empty = tmp_path / "empty.jsonl"
    empty.write_bytes(b"")
    assert run_pipeline("run-batch", empty, TMPDIR=str(private)).returncode == 0
    assert list(private.iterdir()) == []
    private.rmdir()


def all_children(run: RunningCommand) -> list[int]:
    """Redis, the worker and its core, and three processes of the control plane, once all are
    there.
    """

    def control_plane() -> list[int]:
        return [pid for pid in descendants(run.process.pid) if "jobs.control" in command_line(pid)]

    wait_until(lambda: len(control_plane()) == 3, 60, "all children to be there")
    return descendants(run.process.pid)


def workers_of(run: RunningCommand) -> list[int]:
    return [pid for pid in descendants(run.process.pid) if "pipeline worker" in command_line(pid)]


def write_large(source: Path, end: bytes = b"") -> int:
    """Write lines of more than 1 MiB together; return how many."""
    lines = [chat_line(f"c{number}", "x", model=None, max_tokens=1, user="x" * 2500) for number in range(500)]
    source.write_bytes(b"".join(lines) + end)
    return len(lines)


@pytest.mark.proof
def test_the_worker_of_a_large_input_starts_while_that_is_checked(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    count = write_large(source)
    with running_pipeline("run-batch", source, "-o", output, **slow_reading(source, 0.4)) as run:
        run.wait_for("worker INFO ready")
        manifest = load_manifest(str(output) + ".parts")
        assert manifest is not None
        assert (manifest.state, manifest.plan_sha256, manifest.parts) == ("validating", None, [])
        assert "checking the input" in run.output
        started = [run.process.pid, *descendants(run.process.pid)]
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 130
        wait_until(lambda: not any(map(is_running, started)), 60, "all processes to end")
    assert not output.exists()
    done = run_pipeline("run-batch", source, "-o", output)
    assert done.returncode == 0, done.stderr
    results = read_results(output)
    assert [result["custom_id"] for result in results] == [f"c{number}" for number in range(count)]
    assert {result["response"]["status_code"] for result in results} == {200}


def test_a_run_that_starts_over_leaves_the_folder_to_another_one(tmp_path: Path, run_here: RunHere) -> None:
    """Both have seen that the output was removed, and the other one has begun anew."""
    source, output = examples(tmp_path / "in.jsonl", 1), tmp_path / "out.jsonl"
    root = f"{output}.parts"
    spec = BatchSpec(input=str(source), root=root, output=str(output))
    with held(root, "in use", lock=RUN_LOCK):
        save_manifest(Manifest(batch_id="batch_a", created_at=1.0, spec=spec, state="completed", output=str(output)))
        refused = run_here("run-batch", source, "-o", output)
        assert (refused.code, "another run is at work" in refused.err) == (2, True)
        assert sorted(os.listdir(root)) == sorted([RUN_LOCK, NAME])


@pytest.mark.proof
def test_the_worker_of_a_large_input_that_is_refused_ends_with_the_run(tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_large(source, b"not json\n")
    with running_pipeline("run-batch", source, "-o", output, **slow_reading(source, 0.08)) as run:
        wait_until(lambda: workers_of(run), 120, "the worker")
        started = descendants(run.process.pid)
        assert run.wait() == 2
        assert "was refused: 1 bad line" in run.output
        wait_until(lambda: not any(map(is_running, started)), 60, "all processes to end")
    assert not output.exists()
