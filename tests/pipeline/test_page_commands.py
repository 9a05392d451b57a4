"""Blocks of pages that name this file run in their order, in an empty folder, with the demo model
as `./my-model`. A server goes on until the next one starts, or the page ends.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pytest
from pyarrow import csv, parquet

from tests.support.commands import REPOSITORY, command_environment
from tests.support.control_plane import chat_line
from tests.support.page_blocks import PAGES, Block, blocks_of
from tests.support.ports import reserved_port
from workers.settings import DEMO_MODEL

pytestmark = pytest.mark.proof
THIS = str(Path(__file__).relative_to(REPOSITORY))
SECONDS = 240
SERVER = re.compile(r"^(\S*pipeline serve .*)$", re.MULTILINE)
TABLES = "docs/tables.md"
APART = {TABLES: "rm -rf answers* *.results.*"}
"""Pages whose blocks do not go on from those before, and what removes the results of these."""
BEGIN = """
server=
stop() { test -z "$server" || { kill "$server" && wait "$server" || true; }; }
trap stop EXIT
"""
STARTED = r"""stop; \1 &
server=$!
until curl --silent --fail --output /dev/null http://127.0.0.1:8000/ready; do kill -0 "$server"; sleep 0.2; done"""


def run_here(page: str) -> list[Block]:
    return [block for block in blocks_of(page) if block.said == THIS]


@pytest.mark.parametrize("page", [page for page in PAGES if run_here(page)])
def test_the_commands_of_a_page_run(page: str, tmp_path: Path) -> None:
    folder = prepared(page, tmp_path)
    script = "\n".join([BEGIN, *(shell_of(block) for block in run_here(page))])
    with reserved_port() as port:
        code, output = run_shell(script.replace("8000", str(port)), folder, port)
    assert code == 0, output


def run_shell(script: str, folder: Path, port: int) -> tuple[int, str]:
    """Return the exit code and all that was printed; nothing that it started goes on."""
    path = f"{folder / '.venv/bin'}:{os.environ['PATH']}"
    output = folder.parent / "output"
    with output.open("wb") as printed:
        shell = subprocess.Popen(
            ["bash", "-exuo", "pipefail", "-c", script],
            cwd=folder,
            env=command_environment(None, {"PATH": path, "PIPELINE_PORT": str(port)}),
            stdout=printed,
            stderr=printed,
            start_new_session=True,
        )
        try:
            shell.wait(SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
    return shell.wait(), output.read_text()


def prepared(page: str, tmp_path: Path) -> Path:
    """Return a folder with the commands of an environment, a model, and the page's requests."""
    folder = tmp_path / "folder"
    (folder / ".venv" / "bin").mkdir(parents=True)
    write_program(folder, "pipeline", f'{sys.executable} -m pipeline "$@"')
    write_program(folder, "python", f'{sys.executable} "$@"')
    shutil.copytree(DEMO_MODEL, folder / "my-model", copy_function=os.symlink)
    if page == TABLES:
        write_tables(folder)
    if lines := list(requests_of(page)):
        (folder / "requests.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


def write_tables(folder: Path) -> None:
    """Write what the examples of `docs/tables.md` read, and the programs on both ends of a pipe."""
    reviews = pyarrow.table({"review_id": ["r1", "r2"], "product": ["a", "b"], "text": ["Good.", "Bad."]})
    csv.write_csv(reviews, folder / "reviews.csv")
    parquet.write_table(reviews, folder / "reviews.parquet")
    by_year = reviews.append_column("year", [[2025, 2026]])
    parquet.write_to_dataset(by_year, folder / "reviews", partition_cols=["year"])
    (folder / "data").mkdir()
    for name in ("data/a.jsonl", "data/b.jsonl", "more.jsonl"):
        (folder / name).write_bytes(chat_line(name, "hello", "demo"))
    write_program(folder, "produce-requests", "cat more.jsonl")
    write_program(folder, "consume-answers", "cat")


def write_program(folder: Path, name: str, command: str) -> None:
    program = folder / ".venv" / "bin" / name
    program.write_text(f"#!/bin/sh\nexec {command}\n")
    program.chmod(0o755)


def requests_of(page: str) -> Iterator[str]:
    """Yield the lines of a file of requests that the page shows outside of commands."""
    for found in re.finditer(r'^ {4}(\{"custom_id": .*\})$', (REPOSITORY / page).read_text(), re.MULTILINE):
        yield found[1]


def shell_of(block: Block) -> str:
    """Return what bash runs: a server in the background, until it is ready; Python from stdin."""
    if block.language != "python":
        return f"{APART.get(block.page, '')}\n{SERVER.sub(STARTED, block.text)}"
    return f"python - <<'END'\n{block.text}END"
