"""Installs of a wheel: without the worker extra the queue, the control plane, the API and the
command line run without torch; with it a worker's kernels need no C compiler.
"""

import ast
import platform
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from zipfile import ZipFile

import pytest

from jobs.extras import EXTRA_OF
from tools.errors import PACKAGES
from workers.engine.native.build import find_compilers
from workers.engine.native.choose import PREBUILT, library_name
from workers.engine.native.levels import LEVELS, Level, fitting_levels, processor_features

REPOSITORY = Path(__file__).parent.parent
PIP = ("-m", "pip", "--disable-pip-version-check")
PROGRAM = """
import importlib.resources, importlib.util, jobs.queue.request_queue, jobs.control.rq_worker
import jobs.control.ticker, api.app, pipeline.main
for absent in ("torch", "transformers", "triton"):
    assert importlib.util.find_spec(absent) is None, absent
for package in ("jobs", "workers", "api", "pipeline", "batch_inference_pipeline"):
    assert importlib.resources.files(package).joinpath("py.typed").is_file(), package
"""

CLIENT = """
from batch_inference_pipeline import Pipeline
with Pipeline() as p:
    assert [one.text for one in p.map(["Count from 2 to 5."], temperature=0)] == ["Count: 2, 3, 4, 5"]
"""

needs_gcc = pytest.mark.skipif(
    shutil.which("gcc") is None or not fitting_levels(platform.machine(), processor_features()),
    reason="there is no gcc, or no level fits this processor",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the repository, with kernels where there is a compiler."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CC", raising=False)
        (wheel,) = _wheels(tmp_path_factory.mktemp("wheel"))
    return wheel


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_api_and_jobs_install_and_start_without_torch(wheel: Path, tmp_path: Path) -> None:
    python = _new_venv(tmp_path)
    _run(python, *PIP, "install", "-q", wheel)
    _run(python, "-c", PROGRAM)
    _run(python, "-m", "jobs.control.rq_worker", "--help")
    _run(python, "-m", "jobs.control.ticker", "--help")
    _run(tmp_path / "venv" / "bin" / "pipeline", "api", "--help")


@pytest.mark.proof
@pytest.mark.timeout(900)
@needs_gcc
def test_a_wheel_carries_the_kernels_and_needs_no_compiler(wheel: Path, tmp_path: Path) -> None:
    python = _new_venv(tmp_path)
    tag = re.search(r"-py3-none-(manylinux_2_\d+_\w+)\.whl$", wheel.name)
    assert tag is not None, wheel.name
    said = _run(sys.executable, "-m", "auditwheel", "show", wheel).replace("\n", " ")
    assert f'consistent with the following platform tag: "{tag[1]}"' in said
    folder = Path(*PREBUILT.parts[-4:])
    with ZipFile(wheel) as archive:
        carried = {Path(name) for name in archive.namelist() if Path(name).parent == folder}
    assert carried == {folder / library_name(level) for level in LEVELS[platform.machine()] if _is_known(level)}
    _add_dependencies(python)
    _run(python, *PIP, "install", "-q", "--no-deps", "--no-index", wheel)
    lines = (REPOSITORY / "examples" / "requests.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "requests.jsonl").write_text("".join(lines[:3]))
    bare = {"PATH": str(python.parent), "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = (python.with_name("pipeline"), "run-batch", tmp_path / "requests.jsonl", "--device", "cpu")
    said = _run(*command, "--log-level", "info", environment=bare)
    best = fitting_levels(platform.machine(), processor_features())[0]
    assert f"/site-packages/{folder}/{library_name(best)}" in said
    assert "3 requests, 0 failed" in said
    assert not (tmp_path / "cache").exists()


@pytest.mark.proof
@pytest.mark.timeout(900)
def test_an_installed_wheel_is_plain_then_whole(wheel: Path, tmp_path: Path) -> None:
    """Refused without the extra, in words; with it the demo runs, and the client in any project."""
    python = _new_venv(tmp_path)
    _run(python, *PIP, "install", "-q", wheel)
    project = tmp_path / "project"
    project.mkdir()
    (project / "pipeline.py").touch()
    for name in ("api", "jobs"):
        (project / name).mkdir()
        (project / name / "__init__.py").touch()
    environment = {"PATH": str(python.parent), "HOME": str(tmp_path), "PIPELINE_DEVICE": "cpu"}
    redis = {**environment, "REDIS_URL": "redis://127.0.0.1:1"}
    install = "pip install 'batch-inference-pipeline[{}]'\n"
    for arguments, variables, extra in (
        (("run-batch", "requests.jsonl"), environment, "worker"),
        (("serve",), environment, "worker"),
        (("demo",), environment, "worker"),
        (("worker",), redis, "worker"),
        (("fleet", "--ray-address", "auto"), redis, "ray"),
    ):
        refused = subprocess.run(
            [python, "-m", "batch_inference_pipeline", *arguments],
            capture_output=True,
            text=True,
            cwd=project,
            env=variables,
        )
        assert refused.returncode == 2, refused.stderr
        assert refused.stderr.startswith("Error: "), refused.stderr
        assert refused.stderr.endswith(install.format(extra)), refused.stderr
        assert refused.stderr.count("\n") == 1, refused.stderr
    _add_dependencies(python)
    said = _run(python.with_name("pipeline"), "demo", "-o", "found.jsonl", environment=environment, folder=project)
    assert "302 requests, 0 failed" in said
    assert "example-tool: add {" in said
    assert len((project / "found.jsonl").read_text().splitlines()) == 302
    _run(python, "-c", CLIENT, environment=environment, folder=project)


@pytest.mark.proof
@pytest.mark.timeout(900)
def test_a_wheel_that_is_built_from_the_sdist_is_the_same(wheel: Path, tmp_path: Path) -> None:
    python = _new_venv(tmp_path)
    _run(python, *PIP, "install", "-q", "setuptools>=77")
    build = "import setuptools.build_meta as backend; backend.build_sdist({!r})"
    _run(python, "-c", build.format(str(tmp_path)), folder=_source(tmp_path))
    (sdist,) = tmp_path.glob("*.tar.gz")
    _run(python, *PIP, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path / "of", sdist)
    (again,) = (tmp_path / "of").iterdir()
    assert again.name == wheel.name
    with ZipFile(wheel) as first, ZipFile(again) as second:
        assert sorted(second.namelist()) == sorted(first.namelist())


def _is_known(level: Level) -> bool:
    """Return whether a compiler that wheels are built with has the level's instructions."""
    flags = (*level.flags, "-c", "-x", "c", "/dev/null", "-o", "/dev/null")
    return any(subprocess.run([*one, *flags], capture_output=True).returncode == 0 for one in find_compilers())


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_a_wheel_that_is_built_without_a_compiler_runs_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "/nonexistent")
    (wheel,) = _wheels(tmp_path)
    assert wheel.name.endswith("-py3-none-any.whl")
    with ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_an_editable_install_compiles_nothing(tmp_path: Path) -> None:
    source = _source(tmp_path)
    _run(_new_venv(tmp_path), *PIP, "install", "-q", "--no-deps", "-e", source)
    assert not list(tmp_path.rglob(PREBUILT.name))


def test_the_worker_extra_holds_torch_and_the_rest_does_not() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert not any(
        requirement.startswith(("torch", "transformers", "triton")) for requirement in project["dependencies"]
    )
    assert "torch>=2.11,<2.14" in project["optional-dependencies"]["worker"]


def test_what_is_imported_is_declared() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    requirements = [*project["dependencies"], *extras["worker"], *extras["cuda"], *extras["ray"], *extras["tracing"]]
    declared = {_plain(re.split(r"[\[<>=;, ]", requirement)[0]) for requirement in requirements}
    makers = {"pynvml": ["nvidia-ml-py"], **packages_distributions()}  # that one only on machines with a GPU
    imported = {name for package in PACKAGES for path in (REPOSITORY / package).rglob("*.py") for name in _roots(path)}
    foreign = imported - {*PACKAGES, *sys.stdlib_module_names}
    assert {"redis", "h11", "starlette", "torch"} <= foreign
    names = {name: {_plain(maker) for maker in makers.get(name, [name])} for name in foreign}
    assert [name for name in sorted(names) if not names[name] & declared] == []


def test_each_imported_module_of_an_extra_is_in_the_table_of_extras() -> None:
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    makers = {"pynvml": ["nvidia-ml-py"], **packages_distributions()}
    imported = {name for package in PACKAGES for path in (REPOSITORY / package).rglob("*.py") for name in _roots(path)}
    of = {
        _plain(re.split(r"[\[<>=;, ]", line)[0]): extra
        for extra in ("worker", "cuda", "ray", "tracing")
        for line in extras[extra]
    }
    found = {name: of[maker] for name in imported for maker in map(_plain, makers.get(name, [])) if maker in of}
    assert found.items() <= EXTRA_OF.items()  # not all of them are installed on every processor
    assert EXTRA_OF.keys() <= imported


def _roots(path: Path) -> Iterator[str]:
    """The first part of the name of each module that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _new_venv(folder: Path) -> Path:
    """The interpreter of a new virtual environment."""
    venv.create(folder / "venv", with_pip=True)
    return folder / "venv" / "bin" / "python"


def _source(folder: Path) -> Path:
    """A copy of the repository without what others write meanwhile."""
    left_out = shutil.ignore_patterns(".*", "__pycache__", "build", "node_modules", "*.egg-info", "*.parts")
    return Path(shutil.copytree(REPOSITORY, folder / "source", ignore=left_out))


def _wheels(folder: Path) -> list[Path]:
    """The wheel of the repository."""
    _run(sys.executable, *PIP, "wheel", "-q", "--no-deps", "--wheel-dir", folder / "wheels", _source(folder))
    return list((folder / "wheels").iterdir())


def _add_dependencies(python: Path) -> None:
    """Let an environment import what is installed beside pytest; a .pth there is not read."""
    folders = [path for path in sys.path if path.endswith("-packages")]
    (own,) = python.parents[1].glob("lib/python*/site-packages")
    (own / "dependencies.pth").write_text("\n".join(folders))


def _run(*command: object, environment: dict[str, str] | None = None, folder: Path = Path("/")) -> str:
    """What a command says that must succeed."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr
