"""Several inputs of one `pipeline run-batch`: an output for each, on the same worker, and each
resumes by itself.
"""

import json
from pathlib import Path

import pytest

from pipeline.errors import Refused
from pipeline.input_names import named_files
from tests.pipeline.conftest import RunHere
from tests.pipeline.results import read_results
from tests.support.commands import run_pipeline, running_pipeline
from tests.support.poison import Poison, held, poisoned_environment
from tests.support.waiting import wait_until

COUNT = 6


def write_lines(path: Path, **parameters: object) -> Path:
    """Some requests, whose ids begin with the name of the file."""
    lines = [
        {
            "custom_id": f"{path.stem}-{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": f"Count to {number}", "max_tokens": 8, "temperature": 0, **parameters},
        }
        for number in range(COUNT)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def check(output: Path) -> None:
    found = read_results(output)
    assert [line["custom_id"] for line in found] == [f"{output.stem}-{number}" for number in range(COUNT)]
    assert all(line["error"] is None for line in found)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with two files of requests."""
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        write_lines(folder / name)
    return folder


def test_one_input_has_its_output(data: Path) -> None:
    source = data / "a.jsonl"
    assert named_files([source], None) == [(source, data / "a.results.jsonl")]
    assert named_files([source], data / "x") == [(source, data / "x")]


def test_outputs_of_several_are_in_the_folder_under_their_stems(data: Path) -> None:
    sources = [data / "a.jsonl", data / "c.csv.gz", data / "d.parquet"]
    assert [target.name for _, target in named_files(sources, data / "out")] == ["a.jsonl", "c.csv", "d.parquet"]
    beside = [data / "a.results.jsonl", data / "c.results.csv", data / "d.results.parquet"]
    assert [target for _, target in named_files(sources, None)] == beside


def test_a_pattern_stands_for_the_files_that_match_it(data: Path) -> None:
    assert named_files([data / "*.jsonl"], data / "out") == [
        (data / "a.jsonl", data / "out" / "a.jsonl"),
        (data / "b.jsonl", data / "out" / "b.jsonl"),
    ]
    assert named_files([data / "a*"], data / "out") == [(data / "a.jsonl", data / "out" / "a.jsonl")]
    odd = write_lines(data / "[x].jsonl")
    assert named_files([odd], None) == [(odd, data / "[x].results.jsonl")]


def test_a_folder_stands_for_the_files_in_it(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("c #1?.csv", ".hidden.jsonl", "_SUCCESS"):
        (data / name).touch()
    (data / "deep").mkdir()
    write_lines(data / "deep" / "d.jsonl")
    sources = [data / "a.jsonl", data / "b.jsonl", data / "c #1?.csv"]
    for output_folder in (None, data / "out"):
        assert named_files([data], output_folder) == named_files(sources, output_folder)
    for name in ("b.jsonl", "c #1?.csv"):
        (data / name).unlink()
    assert named_files([data], data / "out") == [(data / "a.jsonl", data / "out" / "a.jsonl")]
    monkeypatch.chdir(data)
    assert named_files([Path()], None) == [(Path("a.jsonl"), Path("a.results.jsonl"))]


def test_a_pattern_or_folder_leaves_out_what_the_same_command_wrote_before(data: Path) -> None:
    (data / "out").mkdir()
    for output in (data / "a.results.jsonl", data / "out" / "a.jsonl"):
        write_lines(output)
        parts = output.with_name(f"{output.name}.parts")
        parts.mkdir()
        (parts / "manifest.json").write_text("{}")
        write_lines(parts / "lines.jsonl")
        (parts / "0.parquet").touch()
    write_lines(data / "complete.jsonl")
    (data / ".complete.jsonl.completed").touch()
    sources = [data / "a.jsonl", data / "b.jsonl"]
    for output_folder in (None, data / "out"):
        for named in (data / "**/*.jsonl", data):
            assert [source for source, _ in named_files([named], output_folder)] == sources


def test_results_in_the_place_of_another_input_are_refused(data: Path) -> None:
    write_lines(data / "a.results.jsonl")
    for sources in ([data / "a.jsonl", data / "a.results.jsonl"], [data / "*.jsonl"]):
        with pytest.raises(Refused, match=r"would take the place of the input .*a\.results\.jsonl: name another -o"):
            named_files(sources, None)


def test_two_results_under_one_name_are_refused(data: Path) -> None:
    for sources in ([data / "a.jsonl", data / "a.jsonl.gz"], [data / "*.jsonl", data / "a.jsonl"]):
        with pytest.raises(Refused, match=r"would both be .*a\.jsonl: run them one by one"):
            named_files(sources, data / "out")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["{data}/*.csv"], "no file matches {data}/*.csv"),
        (["{data}", "-o", "{data}"], "the output {data}/a.jsonl is the input itself"),
        (["file://{data}/", "-o", "{data}"], "the output {data}/a.jsonl is the input itself"),
        (["{data}/a.jsonl", "{data}/c.jsonl"], "there is no file {data}/c.jsonl"),
        (["{data}/*.jsonl", "-o", "{data}/a.jsonl"], "the output {data}/a.jsonl is a file"),
        (["{data}/*.jsonl", "-o", "{data}"], "the output {data}/a.jsonl is the input itself"),
        (["{data}/*.jsonl", "--model", "a=x", "--model", "b=y"], "several inputs run on one model"),
    ],
)
def test_inputs_that_cannot_run_together_are_refused_before_anything_begins(
    data: Path, run_here: RunHere, arguments: list[str], reason: str
) -> None:
    before = sorted(data.iterdir())
    done = run_here("run-batch", *(argument.replace("{data}", str(data)) for argument in arguments))
    assert done.code == 2, done.err
    assert reason.replace("{data}", str(data)) in done.err
    assert sorted(data.iterdir()) == before


def test_each_input_runs_on_the_same_worker(data: Path) -> None:
    """One whose lines are bad is refused, and the others are answered."""
    (data / "aa.jsonl").write_text("{}\n")
    output = data.parent / "out"
    done = run_pipeline("run-batch", data, "-o", output)
    assert done.returncode == 2, done.stderr
    assert f"{data}/aa.jsonl:1: " in done.stderr
    assert done.stderr.splitlines()[-1] == "Error: 1 of 3 inputs were refused or have failed lines"
    assert done.stderr.count("worker INFO ready") == 1
    assert done.stdout.count("results: ") == 2
    assert sorted(path.name for path in output.iterdir()) == [
        ".a.jsonl.completed",
        ".b.jsonl.completed",
        "a.jsonl",
        "b.jsonl",
    ]
    for name in ("a", "b"):
        check(output / f"{name}.jsonl")
    (data / "aa.jsonl").unlink()
    write_lines(data / "b.jsonl", seed=5)
    again = run_pipeline("run-batch", data, "-o", output)
    assert again.returncode == 2, again.stderr
    assert f"{data}/b.jsonl has changed since {output}/b.jsonl was begun; remove that file" in again.stderr
    assert again.stderr.splitlines()[-1] == "Error: 1 of 2 inputs were refused or have failed lines"
    assert again.stdout.count("complete before, nothing was run") == 1


@pytest.mark.proof
def test_a_killed_run_goes_on_with_the_file_that_it_was_at(data: Path) -> None:
    output, held_by = data.parent / "out", data.parent / "held"
    write_lines(data / "c.jsonl")
    *others, last = map(json.loads, (data / "b.jsonl").read_text().splitlines())
    last["body"] |= {"prompt": "Count to stone", "max_tokens": 120, "ignore_eos": True}
    (data / "b.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*others, last]))
    flags = ("run-batch", data / "*.jsonl", "-o", output, "--lease-seconds", 2)
    # Once the other lines of the second file have their answers
    poisoned = poisoned_environment(Poison("stone", "hold", start=100), hold=held_by)
    with held(held_by), running_pipeline(*flags, "--max-num-seqs", 2, **poisoned) as run:
        wait_until(lambda: list(output.glob("b.jsonl.parts/parts/*")), 120, "a part of the second file")
        run.process.kill()
        run.wait()
    check(output / "a.jsonl")
    assert not (output / "b.jsonl").exists()
    first = (output / "a.jsonl").read_bytes()
    done = run_pipeline(*flags)
    assert done.returncode == 0, done.stderr
    assert (output / "a.jsonl").read_bytes() == first
    for name in ("a", "b", "c"):
        check(output / f"{name}.jsonl")


@pytest.mark.proof
def test_failed_lines_of_one_input_count_at_the_end(data: Path) -> None:
    write_lines(data / "a.jsonl", temperature=-1)
    done = run_pipeline("run-batch", data / "a.jsonl", data / "b.jsonl", "--fail-on-error")
    assert done.returncode == 1, done.stderr
    assert "6 of 6 requests failed" in done.stderr
    assert done.stderr.splitlines()[-1] == "Error: 1 of 2 inputs were refused or have failed lines"
    assert [line["custom_id"] for line in read_results(data / "b.results.jsonl")] == [f"b-{n}" for n in range(COUNT)]
