"""Choose the native library: from the package, the user's cache, or the C compiler."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from workers.engine.cache_folder import cache_folder, locked
from workers.engine.native.build import (
    NativeUnavailable,
    compile_by_first,
    find_compilers,
    given_compiler,
    source_digest,
)
from workers.engine.native.levels import THIS_PROCESSOR, Level, fitting_levels, processor, processor_features

logger = logging.getLogger(__name__)

PREBUILT = Path(__file__).parent / "prebuilt"
"""The folder of the libraries in a wheel (`setup.py`)."""


@contextlib.contextmanager
def native_library(prebuilt: Path | None = PREBUILT) -> Iterator[Path]:
    """Yield the library's file; load it within the context, since it may be removed afterwards.

    It is the first of:

    1. the best library in `prebuilt` for this processor, if CC is not set
    2. the cached library for this processor, compiled by CC if it is set
    3. a new library, stored in the cache if that is writable

    Processes that start together wait until the first has compiled it. Raises NativeUnavailable.
    """
    given = given_compiler()
    carried = None if given or prebuilt is None else carried_library(prebuilt, processor_features())
    if carried is not None:
        yield carried
        return
    cached = _cache_file(given)
    with contextlib.ExitStack() as stack:
        with locked(cached) if _is_own(cached.parent) else contextlib.nullcontext():
            library = cached if _is_trusted(cached) else _compiled(cached, stack)
        yield library


def library_name(level: Level) -> str:
    """Return the name of a level's library in a wheel, for these sources."""
    return f"{level.name}-{source_digest()}.so"


def carried_library(folder: Path, features: frozenset[str]) -> Path | None:
    """Return the best library in `folder` for a processor with `features`."""
    levels = fitting_levels(platform.machine(), features) if folder.is_dir() else []
    return next((path for path in (folder / library_name(level) for level in levels) if path.is_file()), None)


def _cache_file(given: Sequence[str]) -> Path:
    """Return the cached file for this processor, in a folder that this user owns."""
    made_from = [source_digest().encode(), shlex.join([*given, *THIS_PROCESSOR]).encode(), processor()]
    digest = hashlib.sha256(b"\0".join(hashlib.sha256(part).digest() for part in made_from)).hexdigest()
    folder = cache_folder() / "native"
    with contextlib.suppress(OSError):
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder / f"{digest[:16]}.so"


def _compiled(cached: Path, stack: contextlib.ExitStack) -> Path:
    """Compile the library into a temporary folder, which `stack` removes.

    Returns its copy in the cache, or the temporary file if it cannot be copied.
    """
    compilers = find_compilers()
    try:
        library = Path(stack.enter_context(TemporaryDirectory(prefix="batch-inference-pipeline-"))) / cached.name
    except OSError as error:
        raise NativeUnavailable(f"there is no temporary folder to build it in: {error}") from error
    compile_by_first(compilers, THIS_PROCESSOR, library)
    try:
        _keep(library, cached)
    except OSError as error:
        logger.warning("the CPU kernels cannot be kept in %s, so every start compiles them: %s", cached.parent, error)
        return library
    return cached


def _keep(library: Path, cached: Path) -> None:
    if cached.parent.is_dir() and not _is_own(cached.parent):
        raise PermissionError("it belongs to another user, or others can write to it")
    unfinished = cached.with_suffix(f".{os.getpid()}")
    try:
        shutil.copyfile(library, unfinished)
        unfinished.chmod(0o700)
        with unfinished.open("rb") as file:
            os.fsync(file)  # a file that survives a power loss must be complete
        unfinished.replace(cached)
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink()


def _is_trusted(library: Path) -> bool:
    """Return whether a library exists that no other user can have written."""
    return library.is_file() and _is_own(library) and _is_own(library.parent)


def _is_own(path: Path) -> bool:
    """Return whether a file or folder exists that only this user and root can write to."""
    try:
        found = path.stat()
    except OSError:
        return False
    return found.st_uid in (0, os.geteuid()) and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
