"""`docker/Dockerfile`, read as far as ours goes: stages, and instructions of one line (after
continuations).
"""

import re
import shlex
from dataclasses import dataclass, field

from tests.support.commands import REPOSITORY

DOCKERFILE = REPOSITORY / "docker" / "Dockerfile"


@dataclass
class Stage:
    """What a stage adds to its base, which is another stage or, for the first, an image."""

    name: str
    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def values(self, kind: str) -> list[str]:
        """The arguments of all instructions of a kind."""
        return [value for instruction, value in self.instructions if instruction == kind]


def stages() -> dict[str, Stage]:
    """All stages by name, in the order of the file."""
    text = re.sub(r"\\\n\s*", "", re.sub(r"(?m)^#.*\n", "", DOCKERFILE.read_text()))
    found: dict[str, Stage] = {}
    for line in filter(None, text.splitlines()):
        kind, _, value = line.partition(" ")
        if kind == "FROM":
            base, name = re.fullmatch(r"(\S+) AS (\S+)", value).groups()  # type: ignore[union-attr]
            stage = found[name] = Stage(name, base)
        else:
            stage.instructions.append((kind, value))
    return found


def lineage(name: str) -> list[Stage]:
    """A stage and those it is built on, the oldest first."""
    known, chain = stages(), list[Stage]()
    while name in known:
        chain.insert(0, known[name])
        name = known[name].base
    return chain


def environment(name: str) -> dict[str, str]:
    """What ENV gives to a stage and those built on it."""
    pairs = [pair for stage in lineage(name) for value in stage.values("ENV") for pair in shlex.split(value)]
    return dict(pair.split("=", 1) for pair in pairs)


def folders(name: str) -> list[str]:
    """The folders that an image makes for its user to write to."""
    made = re.findall(
        r"install --directory --owner=pipeline --group=pipeline ([^&]+)",
        " ".join(run for stage in lineage(name) for run in stage.values("RUN")),
    )
    return " ".join(made).split()
