"""A tool parser may be a class of the operator's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.workers.text.parsers.cuts import parse_pieces, parse_whole
from workers.text.errors import ParserError
from workers.text.parsers.answer import AnswerParser
from workers.text.parsers.hermes import HermesParser
from workers.text.parsers.registry import find_tool_parser

_PLUGIN = """
from workers.text.parsers.base import Parsed, ToolCallPiece, ToolParser


class Shout(ToolParser):
    name = "shout"

    def feed(self, text):
        return Parsed(text.upper())

    def finish(self):
        return Parsed(tool_calls=(ToolCallPiece(0, "{}", "f"),))
"""


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    file = tmp_path / "shout.py"
    file.write_text(_PLUGIN)
    return file


def test_loads_a_class_from_a_file(plugin: Path) -> None:
    answer = parse_whole(find_tool_parser(f"{plugin}:Shout")(), "a")
    assert (answer.content, answer.calls[0].name) == ("A", "f")


def test_loads_a_class_from_a_module(plugin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(plugin.parent)
    assert find_tool_parser("shout:Shout").name == "shout"
    assert find_tool_parser("workers.text.parsers.hermes:HermesParser") is HermesParser


def test_gives_up_a_class_that_raises(plugin: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The rest of the answer is content."""
    plugin.write_text(_PLUGIN.replace("text.upper()", "text.upper() if 'b' not in text else 1 / 0"))
    parser = AnswerParser(None, find_tool_parser(f"{plugin}:Shout")())
    answer = parse_pieces(parser, ["a", "b", "a"])
    assert (answer.content, answer.calls) == ("Aba", [])
    assert "tool call parser Shout failed; the rest of the answer is content" in caplog.text


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "There is no tool call parser 'nothing'. Choose one of hermes, "),
        (":Shout", "is not of the form module:Class or file.py:Class"),
        ("json:", "is not of the form module:Class or file.py:Class"),
        ("no_such_module:Shout", "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
        ("no/such/file.py:Shout", "cannot be imported: FileNotFoundError"),
        ("json:Shout", "json has no class Shout; it must be a subclass of"),
        ("json:loads", "json has another kind of object named loads; it must be a subclass of"),
        ("json:JSONDecoder", "json has another kind of object named JSONDecoder; it must be a subclass of"),
        ("..json:Shout", "cannot be imported"),
    ],
)
def test_says_what_is_wrong_with_a_name(name: str, message: str) -> None:
    with pytest.raises(ParserError) as caught:
        find_tool_parser(name)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["raise RuntimeError('no GPU')", "raise SystemExit(3)", "def"])
def test_says_why_a_file_cannot_be_imported(tmp_path: Path, source: str) -> None:
    file = tmp_path / "broken.py"
    file.write_text(source)
    with pytest.raises(ParserError, match=r"cannot be imported: (RuntimeError: no GPU|SystemExit: 3|SyntaxError)"):
        find_tool_parser(f"{file}:Shout")


def test_says_that_a_class_of_the_file_leaves_out_a_method(plugin: Path) -> None:
    plugin.write_text(_PLUGIN.replace("def finish", "def end"))
    with pytest.raises(ParserError, match="Shout does not define finish"):
        find_tool_parser(f"{plugin}:Shout")
