"""Compile `source/` into one shared library. This module does not import torch."""

from __future__ import annotations

import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from workers.engine.messages.errors import EngineError

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).parent / "source"
_COMPILERS = ("gcc", "cc", "clang")
_SECONDS = 300.0  # time limit of a compiler
_FLAGS = (
    *("-std=c11", "-O3", "-fopenmp-simd", "-pthread", "-fPIC", "-Wall"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
)


class NativeUnavailable(EngineError):
    """There is no native library on this machine; the message is a clause with the reason."""


def source_digest() -> str:
    """Return a digest of the sources and flags."""
    parts = [shlex.join(_FLAGS).encode(), *(path.read_bytes() for path in sorted(SOURCE.glob("*.[ch]")))]
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:16]


def given_compiler() -> list[str]:
    """Return the command in the environment variable CC, empty if it is not set.

    Raises NativeUnavailable.
    """
    given = os.environ.get("CC", "")
    command = shlex.split(given)
    if given and not command:
        raise NativeUnavailable("the environment variable CC is blank; it must name a C compiler, or not be set")
    return command


def find_compilers() -> list[list[str]]:
    """Return the commands of the C compilers to try, the best first; only CC if it is set.

    Raises NativeUnavailable.
    """
    if given := given_compiler():
        return [given]
    found = {os.path.realpath(path): path for path in map(shutil.which, reversed(_COMPILERS)) if path}
    if not found:
        raise NativeUnavailable(f"there is no C compiler ({', '.join(_COMPILERS[:-1])} or {_COMPILERS[-1]}) on PATH")
    return [[path] for path in reversed(found.values())]


def compile_by_first(compilers: Sequence[Sequence[str]], instructions: Sequence[str], library: Path) -> None:
    """Compile the library with the first compiler that succeeds.

    Raises NativeUnavailable with the reason of each compiler's failure.
    """
    reasons = []
    for compiler in compilers:
        try:
            return compile_library(compiler, instructions, library)
        except NativeUnavailable as error:
            reasons.append(str(error))
    raise NativeUnavailable("; ".join(reasons))


def compile_library(compiler: Sequence[str], instructions: Sequence[str], library: Path) -> None:
    """Compile the library for `instructions`, flags of gcc and clang; objects remain beside it.

    Raises NativeUnavailable.
    """
    started = time.monotonic()
    sources = sorted(SOURCE.glob("*.c"))
    _run([*compiler, *_FLAGS, *instructions, "-c", *map(str, sources)], library.parent)
    objects = [path.with_suffix(".o").name for path in sources]
    _run([*compiler, "-shared", "-pthread", *objects, "-lm", "-o", library.name], library.parent)
    logger.debug("compiled the CPU kernels in %.1f s", time.monotonic() - started)


def _run(command: Sequence[str], folder: Path) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise NativeUnavailable(f"{command[0]} takes more than {_SECONDS:.0f} s to compile it") from error
    except OSError as error:
        raise NativeUnavailable(f"the C compiler {command[0]} does not run: {error}") from error
    if done.returncode:
        raise NativeUnavailable(f"{command[0]} does not compile it: {_first_error(done.stderr)}")


def _first_error(text: str) -> str:
    lines = text.splitlines()
    return next((line for line in lines if "error" in line), lines[-1] if lines else "it says nothing")
