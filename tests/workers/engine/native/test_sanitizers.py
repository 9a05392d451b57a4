"""The native sources' tests once more, with a library that stops the process at what reads or
writes where it must not.
"""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.workers.engine.native.available import needs_native
from workers.engine.native.build import SOURCE

CHECKS = (
    # Behind all other flags: at -O3 that takes minutes
    "-O1 -fsanitize=address,undefined -fno-sanitize-recover=all -g"
)
FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[3]


def runtime(compiler: str) -> str:
    """The address sanitizer's library, which has to be there before any other."""
    said = subprocess.run(
        [*shlex.split(compiler), "-print-file-name=libasan.so"], capture_output=True, text=True
    ).stdout.strip()
    if not Path(said).is_absolute():
        pytest.skip(f"{compiler} has no libasan.so")
    return said


@pytest.mark.proof
@pytest.mark.timeout(900)
@needs_native
def test_the_kernels_stay_within_their_memory(tmp_path: Path) -> None:
    compiler = os.environ.get("CC") or next(filter(None, map(shutil.which, ("cc", "gcc"))), None)
    if compiler is None:
        pytest.skip("there is no gcc")
    checking = tmp_path / "cc"
    checking.write_text(f'#!/bin/sh\nexec {compiler} "$@" {CHECKS}\n')
    checking.chmod(0o755)
    settings = {
        "LD_PRELOAD": runtime(compiler),
        "CC": str(checking),
        "XDG_CACHE_HOME": str(tmp_path),
        "ASAN_OPTIONS": "detect_leaks=0",
        "OMP_NUM_THREADS": "2",
    }
    tests = [
        str(file)
        for file in sorted(FOLDER.glob("test_*.py"))
        if file.name not in ("test_sanitizers.py", "test_build.py", "test_choose.py")
    ]
    environment = {name: value for name, value in os.environ.items() if name != "TIMED_OUT_TESTS"} | settings
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=800", *tests]
    done = subprocess.run(run, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "no native library" not in done.stdout, done.stdout[-4000:]


@pytest.mark.proof
def test_threads_share_nothing_unasked(tmp_path: Path) -> None:
    if shutil.which("gcc") is None or shutil.which("setarch") is None:
        pytest.skip("there is no gcc, or no setarch")
    program = tmp_path / "threads"
    flags = ("-std=c11", "-O1", "-g", "-pthread", "-fsanitize=thread", "-I", SOURCE)
    sources = (FOLDER / "threads.c", SOURCE / "parallel.c")
    built = subprocess.run(["gcc", *flags, *sources, "-o", program], capture_output=True, text=True)
    if "tsan" in built.stderr:
        pytest.skip("gcc has no thread sanitizer")
    assert built.returncode == 0, built.stderr
    # The sanitizer knows no address space that is laid out at random
    done = subprocess.run(["setarch", "-R", program], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr
