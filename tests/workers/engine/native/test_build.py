"""The native library's way onto the disk: built once, by one process, and never half."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.workers.engine.native.available import needs_native
from workers.engine.native.build import NativeUnavailable, built_library

pytestmark = needs_native


@pytest.mark.proof
def test_is_built_once(tmp_path: Path) -> None:
    library = built_library(tmp_path)
    written = library.stat().st_mtime_ns
    assert built_library(tmp_path) == library
    assert library.stat().st_mtime_ns == written


@pytest.mark.proof
def test_processes_that_start_together_build_it_once(tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\nexec cc "$@"\n')
    compiler.chmod(0o755)
    code = (
        "from pathlib import Path; from workers.engine.native.build import built_library;"
        f" print(built_library(Path({str(tmp_path)!r})))"
    )
    environment = {**_environment(), "CC": str(compiler)}
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment) for _ in range(3)
    ]
    answers = {process.communicate(timeout=120)[0] for process in processes}
    assert len(answers) == 1
    assert Path(answers.pop().decode().strip()).is_file()
    assert sum("-shared" in call for call in (tmp_path / "calls").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("/no/such/compiler", "the C compiler /no/such/compiler does not run"),
        ("false", "the C compiler false does not run"),
        (" ", "CC is blank"),
    ],
)
def test_a_compiler_that_does_not_run(
    compiler: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(NativeUnavailable, match=reason):
        built_library(tmp_path)
    assert not list(tmp_path.glob("*.so"))


def test_a_compiler_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "x.c:1: error: it is too warm" >&2\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(NativeUnavailable, match=r"does not compile it: x\.c:1: error: it is too warm"):
        built_library(tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("native-") and path.suffix != ".lock"]


def test_no_compiler_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NativeUnavailable, match="no C compiler"):
        built_library(tmp_path)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NativeUnavailable, match="cannot be built in"):
        built_library(tmp_path / "file" / "below")


@pytest.mark.proof
def test_a_folder_that_knows_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr("workers.engine.cache_folder.fcntl.flock", refuse)
    assert built_library(tmp_path).is_file()


def test_a_folder_that_may_not_be_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(errno.EACCES, "permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", refuse)  # as it does for who is not root
    with pytest.raises(NativeUnavailable, match="permission denied"):
        built_library(tmp_path)


def test_threads_are_torch_s_own() -> None:
    code = (
        "from workers.engine.native.library import load; load(); "
        "print(len({line.split()[-1] for line in open('/proc/self/maps') if 'gomp' in line or 'iomp' in line}))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env=_environment()).stdout.strip()
        == b"1"
    )


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[4])}
