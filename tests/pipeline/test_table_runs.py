"""`pipeline run-batch` on tables and compressed files: what it makes of them, what it refuses, and
that a run that was killed goes on.
"""

import csv
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from pipeline.input_names import default_output
from tests.pipeline.conftest import RunHere
from tests.support.commands import run_pipeline, running_pipeline
from tests.support.poison import Poison, held, poisoned_environment
from tests.support.waiting import wait_until

COUNT = 12
WORDS = ["music", "sugar", "lion", "fish", "mice", "yacht", "cabin", "quilt", "wolf", "shoe", "cape", "desk"]
BODY = '{"max_tokens": 12, "temperature": 0}'


def rows() -> list[dict[str, Any]]:
    return [{"word": word, "place": f"shelf {number},\nleft"} for number, word in enumerate(WORDS, 1)]


def csv_bytes() -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, ["word", "place"])
    writer.writeheader()
    writer.writerows(rows())
    return text.getvalue().encode()


def jsonl_bytes() -> bytes:
    lines = (
        {
            "custom_id": f"row-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"messages": [{"role": "user", "content": f"Spell: {word}"}], **json.loads(BODY)},
        }
        for number, word in enumerate(WORDS, 1)
    )
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def write_input(path: Path) -> Path:
    """The rows as a file of the kind that its name says."""
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows()), path)
        return path
    data = csv_bytes() if ".csv" in path.name else jsonl_bytes()
    if path.suffix == ".gz":
        data = gzip.compress(data)
    elif path.suffix == ".zst":
        data = pyarrow.compress(data, "zstd", asbytes=True)
    path.write_bytes(data)
    return path


def read_output(path: Path) -> list[dict[str, Any]]:
    """Its rows, or its lines with what a row of a table has."""
    if path.suffix == ".parquet":
        return parquet.read_table(path).to_pylist()
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    elif path.suffix == ".zst":
        data = pyarrow.CompressedInputStream(pyarrow.BufferReader(data), "zstd").read()
    if ".csv" in path.name:
        return list(csv.DictReader(io.StringIO(data.decode(), newline="")))
    lines = [json.loads(line) for line in data.splitlines()]
    return [
        {
            "custom_id": line["custom_id"],
            "text": line["response"]["body"]["choices"][0]["message"]["content"],
            **line.get("columns", {}),
        }
        for line in lines
    ]


def check(output: Path, kept: bool = True) -> None:
    """Every row once and in order, with an answer and the columns of the input."""
    found = read_output(output)
    assert [row["custom_id"] for row in found] == [f"row-{number}" for number in range(1, COUNT + 1)]
    assert all(row["text"] for row in found)
    if kept:
        assert [{"word": row["word"], "place": row["place"]} for row in found] == rows()


def flags(source: Path, output: Path) -> tuple[object, ...]:
    command = ("run-batch", source, "-o", output, "--lease-seconds", 2)
    if ".jsonl" in source.name:
        return command
    return (*command, "--template", "Spell: {word}", "--keep-columns", "word,place", "--body", BODY)


def test_a_table_is_run_by_a_template(tmp_path: Path, run_here: RunHere) -> None:
    source = write_input(tmp_path / "words.csv")
    with source.open("ab") as file:
        file.write(b",nowhere\r\n")
    (tmp_path / "body.json").write_text(BODY)
    body = f"@{tmp_path}/body.json"
    arguments = ("run-batch", source, "--template", "Spell: {word}", "--keep-columns", "word,place", "--body", body)
    done = run_pipeline(*arguments)
    assert done.returncode == 0, done.stderr
    found = read_output(tmp_path / "words.results.csv")
    assert [row["place"] for row in found] == [*(row["place"] for row in rows()), "nowhere"]
    assert found[-1]["error_message"] == "Row 13 has no value in the column word, so there is no prompt."
    assert {row["completion_tokens"] for row in found[:-1]} <= {str(number) for number in range(1, 13)}
    assert f"{COUNT + 1} requests, 1 failed" in done.stdout
    assert done.stdout.startswith("  row-1: ")
    refused = run_here(*(argument if argument != "Spell: {word}" else "Count: {word}" for argument in arguments))
    assert refused.code == 2
    assert "was begun with template Spell: {word}, not Count: {word}" in refused.err.splitlines()[-1]


OPTIONS: list[tuple[str, list[str], str]] = [
    ("words.csv", ["--template", "{word"], "the template has a single '{' at 1"),
    ("words.csv", ["--template", "{word.upper}"], "only the name of a column may be in braces"),
    ("words.csv", ["--template", "{word}", "--prompt-column", "word"], "give one of them"),
    ("words.csv", ["--template", "{wort}"], "words.csv has no column wort; it has: word, place"),
    ("words.parquet", ["--prompt-column", "wort"], "words.parquet has no column wort"),
    ("words.csv", ["--prompt-column", "word", "--id-column", "id"], "has no column id"),
    ("words.csv", ["--prompt-column", "word", "--keep-columns", "word,where"], "has no column where"),
    ("words.csv", ["--keep-columns", "word"], "--keep-columns is for rows of a table: add --prompt-column"),
    ("words.csv", ["--prompt-column", "word", "--keep-columns", "text,input_text"], "would be the column input_text"),
    ("words.csv", ["--prompt-column", "word", "--endpoint", "/v1/score"], "'/v1/score' is none of /v1/chat"),
    ("words.csv", ["--prompt-column", "word", "--body", "[1]"], "it is not a JSON object"),
    ("words.csv", ["--prompt-column", "word", "--body", "@{tmp}/words.csv"], "words.csv is not a JSON object"),
    ("words.csv", ["--prompt-column", "word", "--body", "@{tmp}/none"], "/none cannot be read: No such file"),
    ("words.csv", ["--prompt-column", "word", "--body", '{"max_token": 4}'], "Did you mean 'max_tokens'?"),
    ("words.csv", ["--prompt-column", "word", "--body", '{"messages": []}'], "--body has messages, but the rows"),
    ("words.csv", ["--prompt-column", "word", "--body", '{"stream": true}'], "Streaming is not supported"),
    ("words.csv", ["--template", "{word}\udcff"], "hold bytes that are not UTF-8 text"),
    ("words.csv", [], "needs a column custom_id, and one of body, messages"),
    ("words.jsonl", ["--prompt-column", "word"], "words.jsonl is neither Parquet nor CSV"),
    ("words.csv", ["--prompt-column", "word", "-o", "{tmp}/out.parquet.gz"], "Parquet is compressed as it is"),
]


@pytest.mark.parametrize(("name", "options", "reason"), OPTIONS, ids=[reason for _, _, reason in OPTIONS])
def test_options_that_do_not_fit_are_one_sentence_and_nothing_begins(
    tmp_path: Path, run_here: RunHere, name: str, options: list[str], reason: str
) -> None:
    source = write_input(tmp_path / name)
    done = run_here("run-batch", source, *(option.replace("{tmp}", str(tmp_path)) for option in options))
    assert done.code == 2, done.err
    assert reason in done.err
    assert "Error: " in done.err.splitlines()[-1]
    assert "ready after" not in done.err
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.csv", "a.results.csv"),
        ("a.csv.gz", "a.results.csv"),
        ("a.jsonl.zst", "a.results.jsonl"),
        ("a.pq", "a.results.parquet"),
        ("a.txt", "a.results.jsonl"),
    ],
)
def test_results_are_of_the_kind_of_the_input(name: str, expected: str) -> None:
    assert default_output(Path(name)) == Path(expected)


def no_part_yet(root: Path) -> bool:
    return (root / "lines.jsonl").exists()


def some_parts(root: Path) -> bool:
    return any(root.glob("parts/*"))


def killed(tmp_path: Path, kind: str, suffix: str, moments: list[Callable[[Path], bool]]) -> None:
    """Kill the run at each of these moments, then let it end."""
    source, output = write_input(tmp_path / f"words.{kind}"), tmp_path / f"out.{suffix}"
    root = output.with_name(f"{output.name}.parts")
    hold = tmp_path / "hold"
    holding = poisoned_environment(Poison("yacht", "hold"), hold=hold)  # one row, so that no run ends before its kill
    for moment in moments:
        with held(hold), running_pipeline(*flags(source, output), "--max-num-seqs", 2, **holding) as run:
            wait_until(lambda moment=moment: moment(root), 120, moment.__name__)
            run.process.kill()
            run.wait()
        assert not output.exists()
    done = run_pipeline(*flags(source, output))
    assert done.returncode == 0, done.stderr
    check(output, ".csv" in source.name or source.suffix == ".parquet")


@pytest.mark.proof
def test_a_run_that_was_killed_ends_with_each_row_once(tmp_path: Path) -> None:
    killed(tmp_path, "csv", "csv.gz", [some_parts])


@pytest.mark.proof
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "suffix"),
    [
        ("csv.zst", "csv"),
        ("csv.gz", "parquet"),
        ("parquet", "parquet"),
        ("parquet", "jsonl.zst"),
        ("jsonl.gz", "csv.zst"),
        ("jsonl.zst", "jsonl.gz"),
    ],
)
def test_runs_that_were_killed_twice_end_with_each_row_once(tmp_path: Path, kind: str, suffix: str) -> None:
    killed(tmp_path, kind, suffix, [no_part_yet, some_parts])


@pytest.mark.proof
@pytest.mark.timeout(600)
@pytest.mark.parametrize("suffix", ["parquet", "csv.zst"])
def test_a_run_that_prints_its_results_never_ends_by_a_signal(tmp_path: Path, suffix: str) -> None:
    source, output = write_input(tmp_path / "words.csv.zst"), tmp_path / f"out.{suffix}"
    for _ in range(10):
        done = run_pipeline(*flags(source, output))
        assert done.returncode == 0, done.stderr
        assert f"results: {output}" in done.stdout
