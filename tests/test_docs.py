"""What the documentation names must be there."""

import re
from functools import cache
from pathlib import Path

import pytest

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
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings == ["Unreleased", "0.1.0"]


@pytest.mark.parametrize("page", PAGES)
def test_prose_has_at_most_100_columns(page: str) -> None:
    """Tables, code blocks and lines with a link may be wider."""
    prose = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    lines = [line for line in prose.splitlines() if not line.startswith(("|", "    ")) and "](" not in line]
    assert [line for line in lines if len(line) > MOST_COLUMNS] == []
