"""Where the native library comes from: found without a compiler, built once, by one process, and
never half.
"""

import errno
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.workers.engine.native.available import needs_native
from workers.engine.native import build
from workers.engine.native import library as native
from workers.engine.native.build import NativeUnavailable
from workers.engine.native.choose import carried_library, library_name, native_library
from workers.engine.native.levels import LEVELS, fitting_levels, processor_features

ROOT = Path(__file__).resolve().parents[4]
needs_gcc = pytest.mark.skipif(not shutil.which("cc") and not shutil.which("gcc"), reason="there is no C compiler")
needs_a_level = pytest.mark.skipif(
    not fitting_levels(platform.machine(), processor_features()), reason="no level fits this processor"
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of libraries."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "batch-inference-pipeline" / "native"


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler whose library is the word "library"."""
    script = 'case "$*" in *-shared*) for last; do :; done; echo library > "$last" ;; esac'
    compiler = command(tmp_path / "bin" / "gcc", script)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.delenv("CC", raising=False)
    return compiler


def command(path: Path, script: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def without_compiler(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(folder))


def carried(folder: Path) -> list[Path]:
    """Files of all levels of this machine, the best first."""
    folder.mkdir()
    files = [folder / library_name(level) for level in reversed(LEVELS[platform.machine()])]
    for file in files:
        file.write_text(file.name)
    return files


@needs_a_level
def test_the_best_library_of_the_package_that_fits_comes_first(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_compiler(monkeypatch, tmp_path)
    fitting = fitting_levels(platform.machine(), processor_features())
    files = carried(tmp_path / "prebuilt")
    with native_library(tmp_path / "prebuilt") as library:
        assert library.name == library_name(fitting[0])
    for level, file in zip(reversed(LEVELS[platform.machine()]), files, strict=True):
        assert carried_library(tmp_path / "prebuilt", level.features) == file
        file.unlink()
    assert carried_library(tmp_path / "prebuilt", fitting[0].features) is None
    assert not cache.exists()


@needs_a_level
def test_a_library_of_other_sources_is_not_taken(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    carried(tmp_path / "prebuilt")
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "other.c").touch()
    monkeypatch.setattr(build, "SOURCE", tmp_path / "source")
    assert carried_library(tmp_path / "prebuilt", processor_features()) is None


@needs_a_level
def test_a_compiler_that_is_asked_for_makes_a_library_of_its_own(
    cache: Path, stub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    carried(tmp_path / "prebuilt")
    found = []
    for given in (None, "cc", "cc -mno-avx512f"):
        if given:
            monkeypatch.setenv("CC", given)
        with native_library(tmp_path / "prebuilt" if given else tmp_path) as library:
            found.append(library)
    assert len(set(found)) == len(list(cache.glob("*.so"))) == 3


def test_a_library_in_the_cache_needs_no_compiler(
    cache: Path, stub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with native_library() as library:
        assert library.parent == cache
    without_compiler(monkeypatch, tmp_path)
    with native_library() as again:
        assert again == library
        assert again.read_text() == "library\n"
    library.unlink()
    with pytest.raises(NativeUnavailable, match="no C compiler"), native_library():
        pass


def test_a_cache_that_cannot_be_written_is_replaced_by_a_temporary_folder(
    cache: Path, stub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").touch()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    with caplog.at_level(logging.WARNING), native_library() as library:
        assert library.read_text() == "library\n"
        assert library.parent.parent == tmp_path / "tmp"
        assert library.parent.stat().st_mode & 0o777 == 0o700
    assert not list((tmp_path / "tmp").iterdir())
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith(f"the CPU kernels cannot be kept in {cache}, so every start compiles them: ")
    assert "Not a directory" in line


@pytest.mark.parametrize("shared", ["folder", "file"])
def test_what_others_can_write_is_not_loaded(
    shared: str, cache: Path, stub: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with native_library() as first:
        first.write_text("of another")
    (cache if shared == "folder" else first).chmod(0o777)
    with native_library() as library:
        assert library.read_text() == "library\n"
    assert (library == first) == (shared == "file")
    assert ("others can write to it" in caplog.text) == (shared == "folder")


@pytest.mark.parametrize("left", ["link", "pipe"])
def test_a_lock_that_another_user_left_there_is_no_trap(left: str, cache: Path, stub: Path, tmp_path: Path) -> None:
    with native_library() as built:
        lock, victim = built.with_suffix(".lock"), tmp_path / "victim"
    built.unlink()
    lock.unlink()
    victim.write_text("kept")
    if left == "link":
        lock.symlink_to(victim)
    else:
        os.mkfifo(lock)
    with native_library() as again:
        assert again.read_text() == "library\n"
    assert victim.read_text() == "kept"


@needs_a_level
@needs_native
def test_a_library_of_the_package_that_cannot_be_loaded_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    carried(tmp_path / "prebuilt")
    monkeypatch.setattr(native, "PREBUILT", tmp_path / "prebuilt")
    native.load.cache_clear()
    try:
        assert "prebuilt" not in native.load()._name
    finally:
        native.load.cache_clear()
    assert "cannot use the CPU kernels of the package" in caplog.text


def test_a_folder_that_knows_no_locks(cache: Path, stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr("workers.engine.cache_folder.fcntl.flock", refuse)
    with native_library() as library:
        assert library.is_file()


def test_a_compiler_that_fails_leaves_nothing(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = command(tmp_path / "bin" / "cc", 'echo "x.c:1: error: it is too warm" >&2; exit 1')
    monkeypatch.setenv("CC", str(compiler))
    with (
        pytest.raises(NativeUnavailable, match=r"does not compile it: x\.c:1: error: it is too warm"),
        native_library(),
    ):
        pass
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


@needs_gcc
@pytest.mark.proof
def test_processes_that_start_together_build_it_once(tmp_path: Path) -> None:
    compiler = command(tmp_path / "bin" / "cc", f'echo "$@" >> {tmp_path}/calls\nexec cc "$@"')
    code = "from workers.engine.native.library import load; print(load()._name)"
    settings = {"CC": str(compiler), "XDG_CACHE_HOME": str(tmp_path)}
    run = [sys.executable, "-c", code]
    processes = [subprocess.Popen(run, stdout=subprocess.PIPE, env=_environment(settings)) for _ in range(3)]
    answers = {process.communicate(timeout=120)[0] for process in processes}
    assert len(answers) == 1
    assert Path(answers.pop().decode().strip()).is_file()
    assert sum("-shared" in call for call in (tmp_path / "calls").read_text().splitlines()) == 1


@needs_native
def test_the_library_needs_no_openmp_runtime() -> None:
    with native_library() as library:
        code = library.read_bytes()
    assert b"run_parts" in code
    assert not [name for name in (b"GOMP_", b"omp_get_", b"__kmpc_", b"libgomp", b"libomp") if name in code]


def _environment(settings: dict[str, str]) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **settings}
