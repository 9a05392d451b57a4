"""The table `tests/proofs.toml`: which proofs a change of which files asks for."""

import ast
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.support.commands import REPOSITORY

TABLE = REPOSITORY / "tests" / "proofs.toml"


@dataclass(frozen=True)
class ProofRow:
    """Files or folders of the repository, and the proofs that show what they do."""

    name: str
    sources: tuple[str, ...]
    proofs: dict[str, int]  # a test file -> the seconds that its proofs took in the last full run

    def has(self, path: str) -> bool:
        """Return whether the file at this path of the repository is one of the sources."""
        return _is_among(path, self.sources)


@dataclass(frozen=True)
class ProofTable:
    core_sources: tuple[str, ...]  # the build, what goes over the wire or to disk, the Lua
    core: tuple[str, ...]  # ids of the proofs that a change of these runs first
    rows: tuple[ProofRow, ...]

    @property
    def seconds(self) -> dict[str, int]:
        """Return the seconds of each file that has proofs."""
        return {file: seconds for row in self.rows for file, seconds in row.proofs.items()}

    def touches_core(self, changed: set[str]) -> bool:
        """Return whether one of the changed files is of the build, a wire or disk format or Lua."""
        return any(_is_among(path, self.core_sources) for path in changed)

    def touched(self, changed: set[str]) -> list[str]:
        """Return the files with proofs that the changed files touch, in the table's order."""
        rows = [row for row in self.rows if any(row.has(path) for path in changed)]
        files = {file for row in rows for file in row.proofs}
        of_tests = [path for path in changed if path.startswith("tests/")]
        return [file for file in self.seconds if file in files or any(uses(file, path) for path in of_tests)]


def _is_among(path: str, sources: tuple[str, ...]) -> bool:
    return any(path == source or path.startswith(f"{source}/") for source in sources)


@cache
def read_table(path: Path = TABLE) -> ProofTable:
    """Read the table; a file that two rows name is an error."""
    document = tomllib.loads(path.read_text())
    rows = tuple(ProofRow(row["name"], tuple(row["sources"]), row["proofs"]) for row in document["rows"])
    files = [file for row in rows for file in row.proofs]
    if twice := sorted({file for file in files if files.count(file) > 1}):
        raise ValueError(f"{path.name}: {', '.join(twice)} in two rows; name each file of proofs once")
    return ProofTable(tuple(document["core"]["sources"]), tuple(document["core"]["proofs"]), rows)


@cache
def modules_of(file: str) -> frozenset[str]:
    """Return the files below `tests/` that a test file imports, it and its conftests included."""
    found: set[str] = set()
    new = [file, *(str(folder / "conftest.py") for folder in Path(file).parents)]
    while new:
        path = new.pop()
        if path not in found and (REPOSITORY / path).is_file():
            found.add(path)
            new += _imported(text_of(path))
    return frozenset(found)


def _imported(text: str) -> Iterator[str]:
    """Yield the files that may be the modules of `tests` that a text imports."""
    for node in ast.walk(ast.parse(text)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{name}" for name in names)]
        for name in names:
            if name.startswith("tests."):
                yield from (f"{name.replace('.', '/')}{end}" for end in (".py", "/__init__.py"))


@cache
def text_of(path: str) -> str:
    """Return the text of a file of the repository."""
    return (REPOSITORY / path).read_text()


def uses(file: str, changed: str) -> bool:
    """Return whether a test file imports a changed file below `tests/`, or names one that is no
    module.
    """
    if changed.endswith(".py"):
        return changed in modules_of(file)
    name = Path(changed).name
    return any(name in text_of(module) for module in modules_of(file))
