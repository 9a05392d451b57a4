"""The examples of pages about run-batch and the shell run as printed."""

import csv
import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.pipeline.results import examples, read_results
from tests.support.commands import REPOSITORY, command, command_environment


def example(page: str, heading: str) -> str:
    """Return the first example below a heading."""
    text = (REPOSITORY / page).read_text().split(f"\n## {heading}\n")[1]
    found = re.search(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def run_in_bash(script: str, folder: Path) -> str:
    """Run a script with `pipeline` on PATH; return its stdout."""
    tools = folder / "bin"
    tools.mkdir()
    (tools / "pipeline").write_text(f'#!/bin/sh\nexec {" ".join(command())} "$@"\n')
    (tools / "pipeline").chmod(0o755)
    environment = command_environment(None, {}) | {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
    }
    done = subprocess.run(
        ["bash", "-e", "-c", script], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_shell_completes_commands_flags_and_values(tmp_path: Path) -> None:
    asked = ("pipeline run-b", "pipeline run-batch --keep-p", "pipeline worker --log-level d")
    ask = '_pipeline_completion pipeline; echo "${COMPREPLY[@]}"'
    calls = [f"COMPREPLY=(); COMP_WORDS=({words}); COMP_CWORD={len(words.split()) - 1}; {ask}" for words in asked]
    script = "\n".join([example("docs/command_line.md", "Completion in the shell"), *calls])
    assert run_in_bash(script, tmp_path).split() == ["run-batch", "--keep-parts", "debug"]


@pytest.mark.proof
def test_failed_requests_are_run_again(tmp_path: Path) -> None:
    source = examples(tmp_path / "requests.jsonl", 3)
    [first, *others] = map(json.loads, source.read_text().splitlines())
    first["body"] |= {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    source.write_text("".join(json.dumps(line) + "\n" for line in [first, *others]))
    printed = run_in_bash(example("docs/tables.md", "Resuming"), tmp_path)
    assert re.findall(r"3 requests, \d failed", printed) == ["3 requests, 2 failed", "3 requests, 0 failed"]
    assert all(line["response"]["status_code"] == 200 for line in read_results(tmp_path / "results.jsonl"))


@pytest.mark.proof
def test_a_table_becomes_json(tmp_path: Path) -> None:
    run_in_bash(example("docs/structured_outputs.md", "A table into JSON"), tmp_path)
    with (tmp_path / "ratings.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["custom_id"] for row in rows] == ["1", "2"]
    for row in rows:
        rating = json.loads(row["text"])
        assert rating["mood"] in ("good", "bad")
        assert rating["stars"] in range(1, 6)
