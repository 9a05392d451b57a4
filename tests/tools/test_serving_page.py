"""docs/serving.md names every flag of the HTTP server, and none that does not exist; its commands
are understood.
"""

import re
import shlex

import click

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


def compared() -> list[list[str]]:
    """Of each row about vLLM's flags: these, what there is here, and what is different."""
    beside = [*rows("The server's flags beside vLLM's"), *rows("The engine's flags beside vLLM's")]
    return beside + [cells[1:] for cells in rows("vLLM's flags for what is not here")]


def test_every_flag_of_the_http_server_is_named() -> None:
    missing = [as_flag(parameter_of(one)) for one in declared(HttpSettings)]
    assert [flag for flag in missing if f"`{flag}" not in PAGE] == []


def test_flags_that_are_said_to_be_here_are() -> None:
    for theirs, here, *rest in compared():
        named = FLAG.findall(" ".join([theirs if here.startswith("the same") else here, *rest]))
        assert set(named) <= flags_of("serve") | flags_of("worker"), theirs


def test_flags_that_are_said_to_be_missing_are() -> None:
    for theirs, here, *_ in compared():
        if not here.startswith("the same"):
            assert not set(FLAG.findall(theirs)) - set(FLAG.findall(here)) & flags_of("serve"), theirs


def test_every_flag_of_vllm_is_named_once_and_no_other() -> None:
    """The list has the long names that `vllm serve --help=all` shows, without those that begin with
    `--no-`, and the version in its first line.
    """
    version, *flags = (REPOSITORY / "tests/data/vllm_flags.txt").read_text().splitlines()
    named = [flag for theirs, *_ in compared() for flag in FLAG.findall(theirs)]
    assert sorted(named) == flags
    [release] = re.findall(r"^# vllm serve of vLLM (\d+\.\d+)\.\d+$", version)
    said = re.findall(r"(?:those of|other flag of) vLLM\s(\d+\.\d+)", PAGE)
    assert said == [release, release]


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
