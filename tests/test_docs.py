"""What the documentation names must be there."""

import re
from functools import cache
from pathlib import Path

import click
import pytest

from jobs.version import version
from pipeline.main import cli
from tests.support import page_blocks

ROOT = Path(__file__).parent.parent
PAGES = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/README.md",
    *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md"))),
]
MOST_COLUMNS = 100
MOST_LINES_OF_THE_README = 120
MOST_WORDS = 45_000
"""Of all pages of `docs/` together, without comments."""
_NAME = re.compile(r"`([\w./-]+\.(?:py|lua|md|json|gz|jsonl))`")
_TEST = re.compile(r"`(test_\w+)`")


@cache
def _files() -> list[str]:
    folders = [folder for folder in ROOT.iterdir() if folder.is_dir() and not folder.name.startswith(".")]
    below = [path for folder in folders for path in folder.rglob("*") if "node_modules" not in path.parts]
    return [str(path.relative_to(ROOT)) for path in (*ROOT.glob("*.md"), *below)]


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_a_page_names_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    missing = [name for name in _NAME.findall(text) if not any(f"/{file}".endswith(f"/{name}") for file in _files())]
    assert missing == []


def test_every_test_that_a_page_names_exists() -> None:
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    named = {name for page in PAGES for name in _TEST.findall((ROOT / page).read_text())}
    assert sorted(name for name in named if f"def {name}(" not in tests) == []


def test_every_threat_has_a_test_that_shows_what_happens() -> None:
    rows = re.findall(r"^\| (?!threat|---).+\|$", (ROOT / "docs/security.md").read_text(), re.MULTILINE)
    assert len(rows) > 30
    assert [row for row in rows if not _TEST.search(row.rsplit("|", 2)[1])] == []


def test_the_changelog_has_a_heading_for_each_version() -> None:
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings == ["Unreleased", version(), "0.1.0"]


@pytest.mark.parametrize("page", PAGES)
def test_prose_has_at_most_100_columns(page: str) -> None:
    """Tables, code blocks and lines with a link may be wider."""
    prose = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    lines = [line for line in prose.splitlines() if not line.startswith(("|", "    ")) and "](" not in line]
    assert [line for line in lines if len(line) > MOST_COLUMNS] == []


def test_the_readme_is_read_in_a_minute() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MOST_LINES_OF_THE_README


def test_the_pages_together_are_short() -> None:
    words = {
        page.name: len(re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.DOTALL).split())
        for page in (ROOT / "docs").glob("*.md")
    }
    excess = sum(words.values()) - MOST_WORDS
    assert excess <= 0, f"{excess} words too many: shorten a page of {words}"


def test_the_index_lists_every_page_once() -> None:
    listed = re.findall(r"^- \[(\S+)\]\(\1\): ", (ROOT / "docs/README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in (ROOT / "docs").glob("*.md") if page.name != "README.md")


@pytest.mark.parametrize("page", page_blocks.PAGES)
def test_every_block_of_commands_is_run_or_says_what_it_needs(page: str) -> None:
    blocks = page_blocks.blocks_of(page)
    unmarked = [f"{page}:{block.line}: {block.text.splitlines()[0]}" for block in blocks if not block.kind]
    assert unmarked == [], "put `<!-- run by: tests/FILE.py -->` or `<!-- needs: SOMETHING -->` above each"
    tests = {block.said: (ROOT / block.said).read_text() for block in blocks if block.kind == "run by"}
    assert [test for test, text in tests.items() if page not in text and "blocks_of(page)" not in text] == []


@pytest.mark.parametrize("page", page_blocks.PAGES)
def test_every_pipeline_command_on_a_page_exists(page: str) -> None:
    calls = [call for block in page_blocks.blocks_of(page) for call in page_blocks.pipeline_calls(block.text)]
    calls += page_blocks.inline_calls(page)
    assert [f"pipeline {' '.join(call)}: {wrong}" for call in calls for wrong in unknown_words(call)] == []


def unknown_words(call: list[str]) -> list[str]:
    """Return what a call of `pipeline` names that does not exist: the command, or options."""
    command: click.Command = cli
    words = list(call)
    while isinstance(command, click.Group) and words and re.fullmatch(r"[a-z-]+", words[0]) and words[0][0] != "-":
        found = command.get_command(click.Context(command), words[0])
        if found is None:
            return words[:1]
        command = found
        words.pop(0)
    options = {
        name for param in command.get_params(click.Context(command)) for name in param.opts + param.secondary_opts
    }
    return [word for word in words if re.match(r"--?[a-z]", word) and word.partition("=")[0] not in options]


@pytest.mark.parametrize(
    ("call", "unknown"),
    [("run-batch a.jsonl --outptu-file b", ["--outptu-file"]), ("batch list", ["batch"]), ("keys create --name a", [])],
)
def test_a_misspelled_command_is_found(call: str, unknown: list[str]) -> None:
    assert unknown_words(call.split()) == unknown
