"""docs/tables.md: commands on local files and pipes run as printed; others are understood."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from pipeline.commands.run_batch import run_batch
from tests.support.commands import REPOSITORY, command_environment

PAGE = (REPOSITORY / "docs" / "tables.md").read_text()
COMMANDS = re.findall(r"^    (.*pipeline run-batch .*)$", PAGE, re.MULTILINE)
REMOTE = [line for line in COMMANDS if "://" in line]
REVIEWS = pyarrow.table(
    {"review_id": ["a", "b"], "product": ["tea", "cup"], "text": ["It is good.", "It is small."], "year": [2025, 2026]}
)


def write_files(folder: Path) -> None:
    """Write the inputs that the commands name, and the programs at the ends of their pipes."""
    (folder / "reviews.csv").write_text("product,text\ntea,It is good.\ncup,It is small.\n")
    parquet.write_table(REVIEWS, folder / "reviews.parquet")
    parquet.write_to_dataset(REVIEWS.drop_columns(["product"]), folder / "reviews", partition_cols=["year"])
    (folder / "data").mkdir()
    for name in ("data/one.jsonl", "data/two.jsonl", "more.jsonl"):
        body = {"messages": [{"role": "user", "content": f"Spell: {name}"}], "max_tokens": 4}
        line = {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}
        (folder / name).write_text(json.dumps(line) + "\n")
    programs = {
        "pipeline": f'exec {shlex.quote(sys.executable)} -m pipeline "$@"',
        "produce-requests": "cat data/*.jsonl",
        "consume-answers": "cat > consumed.jsonl",
    }
    (folder / "bin").mkdir()
    for name, script in programs.items():
        program = folder / "bin" / name
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)


@pytest.mark.proof
@pytest.mark.parametrize("line", [line for line in COMMANDS if line not in REMOTE])
def test_a_command_of_the_page_runs(line: str, tmp_path: Path) -> None:
    write_files(tmp_path)
    environment = command_environment(None, {"PIPELINE_MAX_MODEL_LEN": "128"})
    environment["PATH"] = f"{tmp_path / 'bin'}:{environment['PATH']}"
    if "embeddings" in line:
        environment["PIPELINE_TASK"] = "embed"
    before = set(tmp_path.rglob("*"))
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    assert [path for path in set(tmp_path.rglob("*")) - before if path.suffix in (".jsonl", ".csv", ".parquet")]


def test_the_commands_on_uris_are_understood() -> None:
    assert len(REMOTE) >= 3
    for line in REMOTE:
        run_batch.make_context("run-batch", shlex.split(line)[2:])
