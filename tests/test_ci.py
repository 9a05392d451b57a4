"""`.ci/run` in a repository of its own: which failures it repeats, and which end it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import REPOSITORY
from tests.support.time_limits import REFUSED

MAKEFILE = """
test:
	.venv/bin/pytest -q
again:
	.venv/bin/pytest -q "$$TEST"
touched:
	@echo proofs ran
	.venv/bin/pytest -q -m proof proofs.py || test $$? = 5
"""
SETTINGS = f"[pytest]\npythonpath = {REPOSITORY}\naddopts = -ra -p pytest_timeout\nmarkers =\n    proof: long\n"
TESTS = """
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.waiting import wait_until

def is_first(name="tried"):
    mark = Path(name)
    with mark.open("a") as file:
        file.write("x")
    return mark.read_text() == "x"

def test_other():
    pass
"""
TIME_LIMITS = """
def test_condition():
    wait_until(lambda: not is_first("condition"), 0.0, "the second try")

def test_command():
    assert not is_first("command") or subprocess.run(["sleep", "60"], timeout=0.1)

@pytest.mark.timeout(5)
def test_limit():
    assert not is_first("limit") or time.sleep(60)
"""
PROPERTY = "from hypothesis import given, strategies\n@given(number=strategies.integers())"
WAIT = "wait_until(lambda: False, 0.0, 'what never comes')"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A checkout with a suite to be written, and this one's environment."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(REPOSITORY / ".ci" / "run", tmp_path / ".ci" / "run")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "Makefile").write_text(MAKEFILE)
    (tmp_path / "pytest.ini").write_text(SETTINGS)
    (tmp_path / "proofs.py").write_text("")
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["tests.support.time_limits"]\n')
    return tmp_path


def write_test(repository: Path, body: str, decorator: str = "", arguments: str = "") -> None:
    """Write a suite of two tests, one of which is given."""
    test = f"{decorator}\ndef test_it({arguments}):\n    {body}\n"
    (repository / "test_suite.py").write_text(TESTS + test)


def run(repository: Path, *command: object, **variables: object) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TIMED_OUT_TESTS"}
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **{name: str(value) for name, value in variables.items()}}
    return subprocess.run(
        list(map(str, command)), cwd=repository, env=environment, capture_output=True, text=True, timeout=200
    )


@pytest.mark.proof
def test_tests_that_ended_by_a_time_limit_are_repeated_once_and_listed(repository: Path) -> None:
    (repository / "test_suite.py").write_text(TESTS + TIME_LIMITS)
    done = run(repository, repository / ".ci" / "run")
    assert done.returncode == 0, done.stdout + done.stderr
    names = ("command", "condition", "limit")
    assert [(repository / name).read_text() for name in names] == ["xx"] * 3
    listed = "".join(f"  test_suite.py::test_{name}\n" for name in names)
    assert "proofs ran" in done.stdout
    assert done.stdout.endswith(f"\nTests repeated after a time limit: 3\n{listed}")


@pytest.mark.proof
def test_a_second_time_limit_ends_the_run(repository: Path) -> None:
    write_test(repository, WAIT)
    done = run(repository, repository / ".ci" / "run")
    assert done.returncode != 0
    assert done.stdout.count("FAILED test_suite.py::test_it - ") == 2
    assert "proofs ran" not in done.stdout


@pytest.mark.parametrize(
    ("body", "decorator", "arguments"),
    [
        ("assert not is_first()", "", ""),
        pytest.param(f"is_first(); {WAIT}", PROPERTY, "number", marks=pytest.mark.proof),
        pytest.param(f"is_first(); {WAIT}", "@pytest.mark.parametrize('seed', [1])", "seed", marks=pytest.mark.proof),
    ],
    ids=["assertion", "hypothesis", "seed"],
)
def test_any_other_failure_ends_the_run_without_a_repeat(
    repository: Path, body: str, decorator: str, arguments: str
) -> None:
    write_test(repository, body, decorator, arguments)
    done = run(repository, repository / ".ci" / "run")
    assert done.returncode != 0
    assert "FAILED test_suite.py::test_it" in done.stdout
    assert "Repeated" not in done.stdout
    assert "proofs ran" not in done.stdout


@pytest.mark.proof
def test_a_proof_that_fails_fails_the_run_without_a_repeat(repository: Path) -> None:
    (repository / "test_suite.py").write_text(TESTS)
    (repository / "proofs.py").write_text(f"{TESTS}\n@pytest.mark.proof\ndef test_it():\n    {WAIT}\n")
    done = run(repository, repository / ".ci" / "run")
    assert done.returncode != 0
    assert "FAILED proofs.py::test_it" in done.stdout
    assert "Repeated" not in done.stdout


def test_a_lane_that_fails_ends_the_others(repository: Path) -> None:
    (repository / "test_suite.py").write_text(TESTS)
    lane = run(repository, "make", "test", TIMED_OUT_TESTS=repository / "timed_out")
    assert lane.returncode == 0, lane.stdout
    (repository / REFUSED).write_text("other.py::test_it")
    lane = run(repository, "make", "test", TIMED_OUT_TESTS=repository / "timed_out")
    assert lane.returncode != 0
    assert "another lane failed: other.py::test_it" in lane.stdout


def test_without_the_variable_a_time_limit_fails_the_suite(repository: Path) -> None:
    write_test(repository, WAIT)
    done = run(repository, "make", "test")
    assert done.returncode != 0
    assert "1 failed, 1 passed" in done.stdout
