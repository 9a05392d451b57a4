"""Start no file of proofs that would not end in time, for `tests/touched_proofs.py`.

The environment variable PROOF_DEADLINE (seconds since the epoch) asks for it. Files that did not
run to their end are written to the file that NOT_RUN_PROOFS names.
"""

import os
import time
from pathlib import Path

import pytest

from tests.support.proof_table import read_table

UNKNOWN_SECONDS = 60
"""The estimate for a file that the table does not have."""


class ProofBudget:
    """Start a file if its seconds in the table fit into the time left, stretched by how much longer
    the files before it took; end it where the time is used up all the same.
    """

    def __init__(self, deadline: float, seconds: dict[str, int], not_run: Path) -> None:
        self._deadline = deadline
        self._seconds = seconds
        self._not_run = not_run
        self._file = ""
        self._runs = True
        self._began = time.time()
        self._spent = self._expected = 0.0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        file = item.nodeid.partition("::")[0]
        is_new = file != self._file
        if is_new:
            self._close()
            self._file, self._runs, self._began = file, True, time.time()
        if self._runs and not (self._fits(file) if is_new else time.time() < self._deadline):
            self._runs = False
            with self._not_run.open("a") as record:
                record.write(f"{file}\n")
        if not self._runs:
            pytest.skip("not run, for want of time")

    def _fits(self, file: str) -> bool:
        pace = max(1.0, self._spent / self._expected) if self._expected else 1.0
        return time.time() + self._estimate(file) * pace <= self._deadline

    def _estimate(self, file: str) -> int:
        return self._seconds.get(file, UNKNOWN_SECONDS)

    def _close(self) -> None:
        """Count the file before, if it ran."""
        if self._file and self._runs:
            self._spent += time.time() - self._began
            self._expected += self._estimate(self._file)


def pytest_configure(config: pytest.Config) -> None:
    """Register the budget where the environment asks for it."""
    if deadline := os.environ.get("PROOF_DEADLINE"):
        budget = ProofBudget(float(deadline), read_table().seconds, Path(os.environ["NOT_RUN_PROOFS"]))
        config.pluginmanager.register(budget)
