"""Compiles `source/` into one shared library for this very processor, once: it is kept on disk by
what it was made from. No torch here.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from workers.engine.cache_folder import cache_folder, locked
from workers.engine.messages.errors import EngineError

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).parent / "source"
_COMPILERS = ("cc", "gcc", "clang")
_SECONDS = 300.0  # that a compiler may take
_FLAGS = (
    *("-std=c11", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared", "-Wall"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
)
_X86_FLAGS = ("-mprefer-vector-width=512",)


class NativeUnavailable(EngineError):
    """There is no native library on this machine; the message says why, as half a sentence."""


def built_library(folder: Path | None = None) -> Path:
    """Return the library's file in `folder` (by default the user's cache), compiled if it is not
    there yet.

    Processes that start together wait for the first of them. Raises NativeUnavailable.
    """
    compiler, sources = _compiler(), sorted(SOURCE.glob("*.[ch]"))
    flags = [*_FLAGS, *(_X86_FLAGS if platform.machine() == "x86_64" else ())]
    made_from = [
        *(path.read_bytes() for path in sources),
        shlex.join(compiler + flags).encode(),
        _version(compiler),
        _processor(),
    ]
    digest = hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in made_from)).hexdigest()
    library = (folder or cache_folder()) / f"native-{digest[:16]}.so"
    try:
        with locked(library):
            if not library.is_file():
                _compile([*compiler, *flags], [path for path in sources if path.suffix == ".c"], library)
    except OSError as error:
        raise NativeUnavailable(f"it cannot be built in {library.parent}: {error}") from error
    return library


def _compile(command: Sequence[str], sources: Sequence[Path], library: Path) -> None:
    started = time.monotonic()
    unfinished = library.with_suffix(f".{os.getpid()}")
    run = [*command, *map(str, sources), "-lm", "-o", str(unfinished)]
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(run, capture_output=True, text=True, timeout=_SECONDS)
        if done.returncode:
            raise NativeUnavailable(f"{command[0]} does not compile it: {_first_error(done.stderr)}")
        with unfinished.open("rb") as file:
            os.fsync(file)  # a file that survives a power loss must be complete
        unfinished.replace(library)
    except subprocess.TimeoutExpired as error:
        raise NativeUnavailable(f"{command[0]} takes more than {_SECONDS:.0f} s to compile it") from error
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink()
    logger.info("compiled the CPU kernels in %.1f s", time.monotonic() - started)


def _compiler() -> list[str]:
    if asked := os.environ.get("CC"):
        if not (command := shlex.split(asked)):
            raise NativeUnavailable("the environment variable CC is blank; it must name a C compiler, or not be set")
        return command
    found = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if found is None:
        raise NativeUnavailable("there is no C compiler (cc, gcc or clang) on PATH")
    return [found]


def _version(compiler: Sequence[str]) -> bytes:
    try:
        return subprocess.run([*compiler, "--version"], capture_output=True, timeout=_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise NativeUnavailable(f"the C compiler {compiler[0]} does not run: {error}") from error


def _processor() -> bytes:
    """Return the processor's features, as machines that share the folder may differ in them."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return platform.processor().encode()
    return b"".join(line for line in dict.fromkeys(lines) if line.startswith((b"model name", b"flags", b"Features")))


def _first_error(text: str) -> str:
    lines = text.splitlines()
    return next((line for line in lines if "error" in line), lines[-1] if lines else "it says nothing")
