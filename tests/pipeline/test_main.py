"""The command line as a whole."""

import subprocess
import sys
from pathlib import Path

import click
import pytest

import pipeline.commands
from pipeline.main import COMMANDS, CommandGroup
from tests.pipeline.conftest import RunHere
from tests.support.commands import REPOSITORY, command_environment


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_is_found_and_explains_itself(run_here: RunHere, name: str) -> None:
    found = CommandGroup().get_command(None, name)
    assert isinstance(found, click.Command)
    assert found.name == name
    code, out, _ = run_here(name, "--help")
    assert (code, out.startswith(f"Usage: pipeline {name} ")) == (0, True)


def test_each_module_is_a_command() -> None:
    modules = {path.stem.replace("_", "-") for path in Path(pipeline.commands.__path__[0]).glob("[a-z]*.py")}
    assert modules == set(COMMANDS)


def test_help_shows_all_commands_whole(run_here: RunHere) -> None:
    code, out, _ = run_here("--help")
    rows = [row for row in out.splitlines() if row.strip()]
    assert code == 0
    assert [row.split(None, 1) for row in rows[-len(COMMANDS) :]] == [list(row) for row in COMMANDS.items()]


def test_an_unknown_command_is_refused(run_here: RunHere) -> None:
    code, _, err = run_here("run-bach")
    assert code == 2
    assert "No such command 'run-bach'." in err


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("last", ["\\n", ""])
def test_output_that_a_full_disk_does_not_take_is_an_error(unbuffered: str, last: str) -> None:
    program = f"from pipeline import main; main.cli.main = lambda **_: print('x', end='{last}'); main.main()"
    environment = command_environment(None, {"PYTHONUNBUFFERED": unbuffered})
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, cwd=REPOSITORY, env=environment
        )
    assert done.returncode == 1
    [sentence] = done.stderr.decode().splitlines()
    assert sentence.startswith("Error: no space is left on the device")
