"""Tell tests that ended by a time limit from tests that failed, for `.ci/run`, which repeats the
former once.

Where the environment variable TIMED_OUT_TESTS names a file, their ids are appended to it and they
do not fail the run. Any other failure ends the run at once, and those of the other lanes, which see
the file `REFUSED` beside it. Without the variable nothing changes.
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.waiting import WaitTimeout

REFUSED = "refused"
CHAOS = Path(__file__).parents[1] / "chaos"


class TimedOutTests:
    """Record the tests of a run that ended by a time limit, and end the run at any other
    failure.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._refused = file.with_name(REFUSED)
        self._ids: set[str] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        if not self._refused.exists():
            return None
        item.session.shouldstop = f"another lane failed: {self._refused.read_text()}"
        return True  # so that this test does not run

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[pytest.TestReport]:
        report: pytest.TestReport = yield
        if report.failed and call.excinfo is not None:
            if may_be_repeated(item) and is_time_limit(call.excinfo.value):
                self._ids.add(item.nodeid)
            else:
                self._refused.write_text(item.nodeid)
                item.session.shouldfail = f"{item.nodeid} failed; a failure of its kind is not repeated"
        return report

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if not self._ids:
            return
        with self._file.open("a") as file:
            file.writelines(f"{test}\n" for test in sorted(self._ids))
        if not session.shouldfail and exitstatus == pytest.ExitCode.TESTS_FAILED:
            session.exitstatus = pytest.ExitCode.OK


def is_time_limit(error: BaseException) -> bool:
    """Return whether a test ended because something took too long: its own limit, `wait_until`
    or a command.
    """
    if isinstance(error, pytest.fail.Exception):
        return str(error.msg).startswith("Timeout (>")  # pytest-timeout's words
    return isinstance(error, (WaitTimeout, subprocess.TimeoutExpired))


def may_be_repeated(item: pytest.Item) -> bool:
    """Return whether a second try may count: not for chaos and properties, whose failures are
    rare by nature.
    """
    is_property = getattr(getattr(item, "obj", None), "is_hypothesis_test", False) or "seed" in item.fixturenames
    return CHAOS not in item.path.parents and not is_property


def pytest_configure(config: pytest.Config) -> None:
    """Register the record where the environment asks for it."""
    if file := os.environ.get("TIMED_OUT_TESTS"):
        config.pluginmanager.register(TimedOutTests(Path(file)))
