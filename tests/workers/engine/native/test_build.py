"""How the native sources are compiled, and for which instructions."""

import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from workers.engine.native.build import SOURCE, NativeUnavailable, compile_by_first, compile_library, find_compilers
from workers.engine.native.levels import LEVELS, THIS_PROCESSOR, Level, fitting_levels, processor_features

X86 = LEVELS["x86_64"]
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc")
needs_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="its gcc compiles for another machine")
OF_LEVELS = {
    "x86-64-v3": {"__AVX2__", "__FMA__"},
    "avx-vnni": {"__AVXVNNI__"},
    "x86-64-v4": {"__AVX512F__", "__AVX512BW__"},
    "avx512-vnni": {"__AVX512VNNI__"},
    "avx512-bf16": {"__AVX512BF16__"},
    "amx": {"__AMX_TILE__", "__AMX_BF16__", "__AMX_INT8__"},
}
ABOVE = {  # what objdump calls that which a level must not contain
    "x86-64-v3": ("%zmm", "{%k", "vpdpbusd", "vdpbf16ps", "tileload"),
    "avx-vnni": ("%zmm", "{%k", "vdpbf16ps", "tileload"),
    "x86-64-v4": ("vdpbf16ps", "vpdpbusd", "tileload"),
    "avx512-vnni": ("vdpbf16ps", "tileload"),
    "avx512-bf16": ("tileload", "tdpbf16ps"),
    "amx": (),
}
OF_ARM = {"armv8.2": (), "armv8.2-dotprod": ("sdot",), "armv8.2-i8mm": ("sdot", "smmla")}
PROGRAM = [Path(__file__).with_name(name) for name in ("kernels.c", "attention.c")]


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("/no/such/compiler", "the C compiler /no/such/compiler does not run"),
        ("false", "false does not compile it: it says nothing"),
        (" ", "CC is blank"),
    ],
)
def test_a_compiler_that_does_not_run(
    compiler: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(NativeUnavailable, match=reason):
        compile_by_first(find_compilers(), (), tmp_path / "native.so")
    assert not list(tmp_path.iterdir())


def test_no_compiler_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NativeUnavailable, match="no C compiler"):
        find_compilers()


def test_where_one_compiler_fails_the_next_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    works = 'case "$*" in *-shared*) for last; do :; done; echo made by cc > "$last" ;; esac'
    for name, body in (("gcc", "echo 'error: of gcc' >&2; exit 1"), ("cc", works)):
        script = tmp_path / name
        script.write_text(f"#!/bin/sh\n{body}\n")
        script.chmod(0o755)
    library = tmp_path / "native.so"
    compile_by_first(find_compilers(), (), library)
    assert library.read_text() == "made by cc\n"
    with pytest.raises(NativeUnavailable, match=r"of gcc; .*false does not compile it"):
        compile_by_first([[str(tmp_path / "gcc")], ["false"]], (), library)


def test_the_best_level_that_a_processor_runs_comes_first() -> None:
    everything = frozenset[str]().union(*(level.features for level in X86))
    for level in X86:
        assert fitting_levels("x86_64", level.features | {"sse2"})[0] == level
    assert fitting_levels("x86_64", everything) == [*reversed(X86)]
    assert fitting_levels("x86_64", everything - {"amx_bf16"}) == [*reversed(X86[:-1])]
    assert fitting_levels("x86_64", frozenset()) == fitting_levels("riscv64", X86[0].features) == []
    arm = LEVELS["aarch64"]
    for level in arm:
        assert fitting_levels("aarch64", level.features)[0] == level
    assert fitting_levels("aarch64", arm[-1].features) == [*reversed(arm)]


@needs_gcc
@needs_x86
@pytest.mark.parametrize("level", X86, ids=lambda level: level.name)
def test_a_level_has_its_instructions_and_none_beyond(level: Level) -> None:
    command = ["gcc", *level.flags, "-dM", "-E", "-x", "c", "/dev/null"]
    macros = {line.split()[1] for line in subprocess.check_output(command, text=True).splitlines()}
    for other in X86:
        needed = OF_LEVELS[other.name]
        assert needed <= macros if other.features <= level.features else not needed & macros


@needs_gcc
@needs_x86
@pytest.mark.proof
@pytest.mark.skipif(shutil.which("objdump") is None, reason="there is no objdump")
@pytest.mark.parametrize("level", X86, ids=lambda level: level.name)
def test_the_library_of_a_level_has_no_instruction_beyond_it(level: Level, tmp_path: Path) -> None:
    library = tmp_path / "native.so"
    compile_library(["gcc"], level.flags, library)
    code = subprocess.check_output(["objdump", "-d", "--no-show-raw-insn", library], text=True)
    assert "vfmadd" in code
    assert [name for name in ABOVE[level.name] if name in code] == []


def compiled(compiler: str, flags: Sequence[str], folder: Path) -> Path:
    """Return a program that compares the kernels of a set of instructions with plain loops."""
    library, program = folder / "native.so", folder / "kernels"
    compile_library(shlex.split(compiler), flags, library)
    command = [*shlex.split(compiler), "-I", SOURCE, *PROGRAM, library, "-lm", "-o", program]
    subprocess.run(command, check=True)
    return program


@needs_gcc
@needs_x86
@pytest.mark.proof
@pytest.mark.parametrize(
    "flags",
    [
        ("-march=x86-64",),
        ("-march=native", "-mno-avx512f"),
        ("-march=native", "-mno-avx512f", "-mno-avxvnni"),
        ("-march=native", "-mno-avx512vnni"),
        ("-march=native", "-mno-avx512bf16"),
        ("-march=native",),
    ],
)
def test_kernels_are_right_with_fewer_instructions_than_the_processor_has(flags: Sequence[str], tmp_path: Path) -> None:
    halves = [] if flags == ("-march=x86-64",) or "f16c" not in processor_features() else ["halves"]
    assert subprocess.check_output([compiled("gcc", flags, tmp_path), *halves], text=True) == "right\n"


@pytest.mark.proof
@pytest.mark.parametrize("compiler", ["gcc-11", "gcc-12", "clang-14", "clang"])
def test_kernels_are_right_by_every_compiler(compiler: str, tmp_path: Path) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler}")
    program = compiled(compiler, THIS_PROCESSOR, tmp_path)
    needed = subprocess.check_output(["ldd", tmp_path / "native.so"], text=True)
    assert "omp" not in needed
    assert subprocess.check_output([program], text=True) == "right\n"


@needs_gcc
@pytest.mark.proof
@pytest.mark.skipif("avx512f" not in processor_features(), reason="this processor has nothing above AVX2")
def test_products_of_integers_are_right_without_avx512(tmp_path: Path) -> None:
    environment = os.environ | {"CC": "gcc -mno-avx512f", "XDG_CACHE_HOME": str(tmp_path)}
    tests = ("-k", "equals_sums and not 2304", str(Path(__file__).with_name("test_integers.py")))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout


@pytest.mark.proof
@pytest.mark.skipif(shutil.which("aarch64-linux-gnu-gcc") is None, reason="there is no gcc for aarch64")
@pytest.mark.parametrize("compiler", ["aarch64-linux-gnu-gcc", "clang-14 --target=aarch64-linux-gnu"])
@pytest.mark.parametrize("level", LEVELS["aarch64"], ids=lambda level: level.name)
def test_the_sources_compile_for_arm_and_run(level: Level, compiler: str, tmp_path: Path) -> None:
    if shutil.which(compiler.split()[0]) is None:
        pytest.skip(f"there is no {compiler}")
    program = compiled(compiler, level.flags, tmp_path)
    assert (tmp_path / "native.so").read_bytes()[18:20] == b"\xb7\x00"  # EM_AARCH64
    disassembly = ["aarch64-linux-gnu-objdump", "-d", "--no-show-raw-insn", tmp_path / "native.so"]
    code = subprocess.check_output(disassembly, text=True)
    assert tuple(name for name in OF_ARM["armv8.2-i8mm"] if name in code) == OF_ARM[level.name]
    emulator = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if emulator is None:
        pytest.skip("compiled, and not run: there is no qemu-user")
    libraries = subprocess.check_output(["aarch64-linux-gnu-gcc", "-print-file-name=libc.so.6"], text=True).strip()
    root = Path(libraries).resolve().parents[1]
    assert subprocess.check_output([emulator, "-L", root, program, "halves"], text=True) == "right\n"
