"""Apply each fault of `faults.toml` to a copy of the tree and run the tests that must find it.

python -m tests.faults [--only TEXT]

Exit code 1 if a fault is not found.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.faults.faults import Fault, read_faults
from tests.support.commands import REPOSITORY

_SECONDS = 600  # that the tests of one fault may take
_NO_END = f"its tests did not end within {_SECONDS} s"


class FaultVerdict(NamedTuple):
    """Which test found a fault, if one did, after how many seconds."""

    test: str | None
    seconds: float


def main() -> int:
    """Run the faults that the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description="Check that the suite finds faults.")
    parser.add_argument("--only", default="", help="part of a fault's file or kind")
    options = parser.parse_args()
    faults = [fault for fault in read_faults() if options.only in f"{fault.file} {fault.kind}"]
    missed = 0
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        copy_tree(Path(folder))
        for number, fault in enumerate(faults, 1):
            verdict = try_fault(fault, Path(folder))
            missed += verdict.test is None
            print(f"{number}/{len(faults)} {verdict.seconds:4.0f} s  {fault.kind} in {fault.file}: ", end="")
            print(verdict.test or "NOT FOUND", flush=True)
    print(f"{len(faults) - missed} of {len(faults)} faults found")
    return 1 if missed else 0


def copy_tree(folder: Path) -> None:
    """Copy the tracked files of the working tree."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, check=True).stdout
    subprocess.run(["xargs", "-0", "cp", "--parents", "-t", str(folder)], cwd=REPOSITORY, input=names, check=True)


def try_fault(fault: Fault, folder: Path) -> FaultVerdict:
    """Run the fault's tests on the faulty copy, the fast ones first; the copy is whole again
    afterwards.
    """
    path = folder / fault.file
    text = path.read_text()
    path.write_text(fault.applied(text))
    began = time.monotonic()
    try:
        found = run_tests(fault, folder) or run_tests(fault, folder, "-m", "proof")
    finally:
        path.write_text(text)
    if found is not None and found != _NO_END and not passes(found, folder):
        raise RuntimeError(f"{found} does not pass without the fault in {fault.file} either")
    return FaultVerdict(found, time.monotonic() - began)


def run_tests(fault: Fault, folder: Path, *options: str) -> str | None:
    """Return the first test that fails, or None.

    Raises RuntimeError where the tests could not be run.
    """
    try:
        done = run_pytest([*options, *fault.tests], folder)
    except subprocess.TimeoutExpired:
        return _NO_END
    if done.returncode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if done.returncode != pytest.ExitCode.TESTS_FAILED or failed is None:
        raise RuntimeError(f"the tests of {fault.file} did not run:\n{done.stdout}{done.stderr}")
    return failed[1]


def passes(test: str, folder: Path) -> bool:
    """Return whether a test passes in time."""
    try:
        return run_pytest([test, "-m", "proof or not proof"], folder).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def run_pytest(arguments: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run tests of the copy. Raises `TimeoutExpired`."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    environment.pop("TIMED_OUT_TESTS", None)
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
