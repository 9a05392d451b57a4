"""`make matrix`, and the CI workflow that calls it."""

import subprocess
import sys
from pathlib import Path

import pytest

from jobs.server import find_server
from tests import matrix
from tests.support.commands import REPOSITORY

USES_THE_SERVER_NAMED = """
from jobs.server import find_server
def test_it():
    assert find_server().parent.name.startswith("matrix-")
"""


def test_each_server_runs_the_tests_and_is_reported_with_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(REPOSITORY)
    tests, server = tmp_path / "test_it.py", str(find_server())
    pytest_arguments = ["--", "-p", "no:schemathesis", "-p", "no:hypothesispytest", str(tests)]
    tests.write_text(USES_THE_SERVER_NAMED)
    assert matrix.main([server, *pytest_arguments]) == 0
    passed = capfd.readouterr().out.splitlines()[-1]
    tests.write_text("def test_it():\n    assert False\n")
    assert matrix.main([server, "/bin/true", "nowhere/redis-server", *pytest_arguments]) == 1
    failed, *not_run = capfd.readouterr().out.splitlines()[-3:]
    assert passed.startswith(("Redis ", "Valkey "))
    assert "passed in" in passed
    assert "failed (exit code 1)" in failed
    assert all("not run" in line for line in not_run)


def test_no_server_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert matrix.main(["--", "tests/jobs"]) == 2
    assert "usage: make matrix" in capsys.readouterr().err


def test_the_workflow_is_one() -> None:
    workflow = REPOSITORY / ".github" / "workflows" / "ci.yml"
    schema = "vendor.github-workflows"
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, str(workflow)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
