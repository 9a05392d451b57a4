"""An install without the worker extra: the queue, the control plane, the API and the command line
run without torch.
"""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
PACKAGES = ("jobs", "workers", "api", "pipeline")
PROGRAM = """
import importlib.resources, importlib.util, jobs.queue.request_queue, jobs.control.rq_worker
import jobs.control.ticker, api.app, pipeline.main
for absent in ("torch", "transformers", "triton"):
    assert importlib.util.find_spec(absent) is None, absent
for package in ("jobs", "workers", "api", "pipeline"):
    assert importlib.resources.files(package).joinpath("py.typed").is_file(), package
"""


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_api_and_jobs_install_and_start_without_torch(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    ours = shutil.ignore_patterns(
        ".*", "__pycache__", "build", "node_modules", "*.egg-info", "*.parts"
    )  # what others write meanwhile
    source = shutil.copytree(REPOSITORY, tmp_path / "source", ignore=ours)
    _run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", source)
    _run(python, "-c", PROGRAM)
    _run(python, "-m", "jobs.control.rq_worker", "--help")
    _run(python, "-m", "jobs.control.ticker", "--help")
    _run(tmp_path / "venv" / "bin" / "pipeline", "api", "--help")


def test_the_worker_extra_holds_torch_and_the_rest_does_not() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert not any(
        requirement.startswith(("torch", "transformers", "triton")) for requirement in project["dependencies"]
    )
    assert "torch>=2.11,<2.14" in project["optional-dependencies"]["worker"]


def test_what_is_imported_is_declared() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    requirements = [*project["dependencies"], *extras["worker"], *extras["cuda"], *extras["tracing"]]
    declared = {_plain(re.split(r"[\[<>=;, ]", requirement)[0]) for requirement in requirements}
    makers = {"pynvml": ["nvidia-ml-py"], **packages_distributions()}  # that one only on machines with a GPU
    imported = {name for package in PACKAGES for path in (REPOSITORY / package).rglob("*.py") for name in _roots(path)}
    foreign = imported - {*PACKAGES, *sys.stdlib_module_names}
    assert {"redis", "h11", "starlette", "torch"} <= foreign
    names = {name: {_plain(maker) for maker in makers.get(name, [name])} for name in foreign}
    assert [name for name in sorted(names) if not names[name] & declared] == []


def _roots(path: Path) -> Iterator[str]:
    """The first part of the name of each module that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _run(*command: object) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
