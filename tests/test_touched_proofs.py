"""The table of proofs has a row for each source file, and a change runs what fits into its time."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.commands import REPOSITORY
from tests.support.proof_budget import ProofBudget
from tests.support.proof_table import ProofRow, ProofTable, read_table
from tests.touched_proofs import newest_full_proof

OF_EVERYTHING = {"everything at once", "upgrades"}
TWO_ROWS = ProofTable(
    ("setup.py",),
    ("tests/b.py",),
    (ProofRow("one", ("api", "jobs/queue"), {"tests/b.py": 5}), ProofRow("two", ("api",), {"tests/a.py": 5})),
)


def tracked_files() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no checkout of git")
    return listed.stdout.splitlines()


def test_every_source_file_belongs_to_a_row() -> None:
    rows = [row for row in read_table().rows if row.name not in OF_EVERYTHING]
    sources = [file for file in tracked_files() if not file.startswith("tests/")]
    assert [file for file in sources if not any(row.has(file) for row in rows)] == []


def test_every_source_and_proof_of_the_table_exists() -> None:
    table = read_table()
    named = [*table.core_sources, *table.seconds, *(proof.partition("::")[0] for proof in table.core)]
    named += [source for row in table.rows for source in row.sources]
    assert [name for name in named if not (REPOSITORY / name).exists()] == []


@pytest.mark.parametrize(
    ("changed", "proofs"),
    [
        ("api/main.py", ["tests/b.py", "tests/a.py"]),
        ("jobs/queue/lua/claim.lua", ["tests/b.py"]),
        ("jobs/queue.py", []),
        ("docs/api.md", []),
    ],
)
def test_a_change_touches_the_proofs_of_its_rows_in_their_order(changed: str, proofs: list[str]) -> None:
    assert TWO_ROWS.touched({changed}) == proofs
    assert not TWO_ROWS.touches_core({changed})
    assert TWO_ROWS.touches_core({"setup.py"})


@pytest.mark.parametrize(
    ("helper", "proof"),
    [
        ("tests/support/sentinels.py", "tests/pipeline/test_failover.py"),
        ("tests/support/http_calls.py", "tests/api/test_live_storm.py"),  # imported from its package
        ("tests/api/conftest.py", "tests/api/test_live_storm.py"),
        ("tests/data/pool.jsonl.gz", "tests/pipeline/test_pool.py"),
    ],
)
def test_a_change_of_a_helper_touches_the_proofs_that_use_it(helper: str, proof: str) -> None:
    touched = read_table().touched({helper})
    assert proof in touched
    assert "tests/workers/engine/native/test_attention.py" not in touched


def test_a_proof_that_the_table_lacks_ends_a_run(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_collection_modifyitems\n")
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {REPOSITORY}\nmarkers = proof: long\n")
    (tmp_path / "test_new.py").write_text("import pytest\n@pytest.mark.proof\ndef test_it(): pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "tests/proofs.toml lacks test_new.py: add each to the row of what it proves" in done.stderr


def test_the_newest_row_that_is_an_ancestor_is_the_base() -> None:
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True)
    if head.returncode:
        pytest.skip("no checkout of git")
    commit = head.stdout.strip()
    page = f"| {'0' * 40} | elsewhere |\n## Full proofs\n| {commit} | older |\n| {'1' * 40} | of no branch |\n"
    assert newest_full_proof(page) == commit
    assert newest_full_proof("## Full proofs\n") is None


class Item:
    def __init__(self, file: str) -> None:
        self.nodeid = f"{file}::test_it"


@pytest.mark.parametrize(("seconds_left", "not_run"), [(100.0, ""), (30.0, "tests/b.py\n")])
def test_a_file_that_would_not_end_in_time_is_not_started_and_listed(
    tmp_path: Path, seconds_left: float, not_run: str
) -> None:
    record = tmp_path / "not_run"
    record.touch()
    budget = ProofBudget(time.time() + seconds_left, {"tests/a.py": 10, "tests/b.py": 40}, record)
    assert [runs(budget, name) for name in "abb"] == [True, not not_run, not not_run]
    assert record.read_text() == not_run


def test_a_file_that_takes_longer_than_expected_is_cut_and_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "not_run"
    budget = ProofBudget(time.time() + 100, {"tests/a.py": 10}, record)
    assert runs(budget, "a")
    later = time.time() + 101
    monkeypatch.setattr(time, "time", lambda: later)
    assert not runs(budget, "a")
    assert not runs(budget, "a")
    assert record.read_text() == "tests/a.py\n"


def runs(budget: ProofBudget, name: str) -> bool:
    try:
        budget.pytest_runtest_setup(Item(f"tests/{name}.py"))  # type: ignore[arg-type]
    except pytest.skip.Exception:
        return False
    return True
