"""docs/serving.md names every flag of the HTTP server, and none that does not exist; its commands
are understood.
"""

import re
import shlex

import click
import pytest

from api.http_settings import HttpSettings
from pipeline.main import cli
from pipeline.options import as_flag, declared, parameter_of
from tests.support.commands import REPOSITORY

PAGE = (REPOSITORY / "docs" / "serving.md").read_text()
FLAG = re.compile(r"`(--[a-z0-9-]+)")


def flags_of(name: str) -> set[str]:
    command = cli.get_command(None, name)  # type: ignore[arg-type]
    assert command is not None
    return {option for param in command.params for option in param.opts if option.startswith("--")}


def rows(heading: str) -> list[list[str]]:
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    return [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][2:]


def test_every_flag_of_the_http_server_is_named() -> None:
    missing = [as_flag(parameter_of(one)) for one in declared(HttpSettings)]
    assert [flag for flag in missing if f"`{flag}" not in PAGE] == []


@pytest.mark.parametrize(
    ("heading", "column"), [("The server's flags beside vLLM's", 1), ("The engine's flags beside vLLM's", 1)]
)
def test_flags_that_are_said_to_be_here_are(heading: str, column: int) -> None:
    ours = flags_of("serve") | flags_of("worker")
    for cells in rows(heading):
        theirs, here = cells[0], cells[column]
        named = FLAG.findall(theirs if here.startswith("the same") else here)
        assert set(named) <= ours, cells


def test_flags_that_are_said_to_be_missing_are() -> None:
    ours = flags_of("serve")
    for theirs, here, *_ in rows("The server's flags beside vLLM's"):
        if here == "–":
            assert not set(FLAG.findall(theirs)) & ours, theirs


def test_its_commands_are_understood() -> None:
    blocks = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    lines = [shlex.split(line) for block in blocks for line in block.splitlines() if line.startswith("pipeline ")]
    assert len(lines) >= 6
    for _, name, *arguments in lines:
        command = cli.get_command(None, name)  # type: ignore[arg-type]
        assert command is not None
        while isinstance(command, click.Group):
            found = command.get_command(click.Context(command), arguments.pop(0))
            assert found is not None
            command = found
        with command.make_context(name, arguments, resilient_parsing=False) as context:
            assert context.args == [], arguments
