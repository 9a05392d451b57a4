"""Fixtures: the `pipeline` command in this process, which is quicker than one of its own."""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from pipeline.main import main


class CommandOutcome(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


RunHere = Callable[..., CommandOutcome]


@contextlib.contextmanager
def kept_log() -> Iterator[None]:
    """Take back what a command does to this process' log."""
    handlers, level = list(logging.root.handlers), logging.root.level
    try:
        yield
    finally:
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)


@pytest.fixture(autouse=True)
def log_of_each_test() -> Iterator[None]:
    with kept_log():
        yield


@pytest.fixture
def run_here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> RunHere:
    """Runs the command to its end: `run_here(*arguments, REDIS_URL=...)`."""
    for name in [name for name in os.environ if name == "REDIS_URL" or name.startswith(("PIPELINE_", "OPENAI_"))]:
        monkeypatch.delenv(name)

    def run(*arguments: object, **environment: str) -> CommandOutcome:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        capsys.readouterr()
        with kept_log(), pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        assert isinstance(ended.value.code, int)
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        return CommandOutcome(ended.value.code, printed.out, printed.err)

    return run
