"""Fixtures: the `pipeline` command in this process, which is quicker than one of its own."""

import os
from collections.abc import Callable
from typing import NamedTuple

import pytest

from pipeline.main import main
from tests.support.logs import kept_log


class CommandOutcome(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


RunHere = Callable[..., CommandOutcome]


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
