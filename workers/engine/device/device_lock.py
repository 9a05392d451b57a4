"""GPU locks of a host: one per GPU, held by the processes that use it.

A lock is an flock on a file named after the GPU. The kernel releases it when the last process that
holds it ends, even if that is killed, so no lock is ever stale; the file's content is only
informative. A process locks all GPUs that it needs, or none.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from workers.engine.messages.errors import ModelLoadError

WAIT_SECONDS = 20.0
"""Time for a killed process to release its GPU: the driver first frees its memory."""

_POLL_SECONDS = 0.1
_FOLDERS = (Path("/run/lock"), Path("/tmp"))
_ALL_MAY_WRITE = 0o666
_GATE = "choosing"
_TRIES = 3

_held: dict[Path, list[int]] = {}
"""This process' open files by lock file; it may acquire its own locks again."""


@dataclass(frozen=True, slots=True)
class TakenGpus:
    """Locked GPUs: indices in ascending order, the open files that hold the locks, and names."""

    indices: list[int]
    fds: list[int]
    names: list[str]

    def release(self) -> None:
        """Release this process' locks; children that inherited the files keep theirs."""
        for fd in self.fds:
            for fds in _held.values():
                if fd in fds:
                    fds.remove(fd)
            os.close(fd)


def take_gpus(
    names: Sequence[str], count: int, folder: str | None, index: int | None = None, wait_seconds: float | None = None
) -> TakenGpus:
    """Lock `count` free GPUs among `names`, or the one at `index`; wait up to `wait_seconds`.

    `names` are the same for all processes of the host, in any order. `folder` holds the locks
    (None: a folder that all users of the host share). A GPU that this process has counts as free.
    Raises ModelLoadError, without locking any, if there are fewer GPUs or too few free ones.
    """
    place = Path(folder) if folder else shared_folder()
    wanted = range(len(names)) if index is None else [index]
    if count > len(wanted):
        raise ModelLoadError(
            f"{_gpus(count)} {'is' if count == 1 else 'are'} needed, but there {_are(len(wanted))} here"
        )
    deadline = time.monotonic() + (WAIT_SECONDS if wait_seconds is None else wait_seconds)
    try:
        place.mkdir(parents=True, exist_ok=True)
        while (taken := _try(place, names, wanted, count)) is None:
            if time.monotonic() >= deadline:
                raise ModelLoadError(_refusal(place, [names[at] for at in wanted], count))
            time.sleep(_POLL_SECONDS)
    except OSError as error:
        raise ModelLoadError(
            f"GPUs cannot be locked in {place}: {error.strerror}; name a folder that all workers of this host may"
            " write to with --device-lock-folder"
        ) from error
    return taken


def shared_folder() -> Path:
    """Return the first usual folder with mode 1777, where users share files safely."""
    for folder in _FOLDERS:
        with suppress(OSError):
            if stat.S_IMODE(folder.stat().st_mode) & 0o1777 == 0o1777:
                return folder
    return _FOLDERS[-1]


def _try(folder: Path, names: Sequence[str], wanted: Sequence[int], count: int) -> TakenGpus | None:
    """Try once to lock the GPUs, under a gate lock.

    Without the gate, two processes with half of their GPUs each would wait for each other.
    """
    with ExitStack() as undo:
        gate = _open(_file(folder, _GATE))
        undo.callback(os.close, gate)
        if not _flock(gate, fcntl.LOCK_EX):
            return None
        taken = TakenGpus([], [], [])
        for at in wanted:
            fd = _lock(_file(folder, names[at])) if len(taken.fds) < count else None
            if fd is not None:
                taken.indices.append(at)
                taken.fds.append(fd)
                taken.names.append(names[at])
        if len(taken.fds) < count:
            taken.release()
            return None
    return taken


def _lock(file: Path) -> int | None:
    """Lock a file for this process; return a descriptor, or None if another process holds it."""
    own = _held.setdefault(file, [])
    fd = os.dup(own[0]) if own else _lock_anew(file)
    if fd is not None:
        own.append(fd)
    return fd


def _lock_anew(file: Path) -> int | None:
    fd = _open(file)
    # If the file was removed after it was opened, the next process would lock another file of the
    # same name.
    if not _flock(fd, fcntl.LOCK_EX) or not _is_at(fd, file):
        os.close(fd)
        return None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return fd


def _flock(fd: int, kind: int) -> bool:
    """Lock without waiting; return whether that succeeded."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(fd: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(file, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _open(file: Path) -> int:
    """Open a file that every user may lock; create it if it is absent.

    An existing file is opened without O_CREAT: in a folder that all users share (sticky, like
    /tmp), Linux refuses O_CREAT for another user's file.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    for _ in range(_TRIES):
        try:
            return os.open(file, flags)
        except PermissionError:  # its creator is about to change its mode
            time.sleep(_POLL_SECONDS)
        except FileNotFoundError:
            with suppress(FileExistsError):
                fd = os.open(file, flags | os.O_CREAT | os.O_EXCL, _ALL_MAY_WRITE)
                os.fchmod(fd, _ALL_MAY_WRITE)  # the umask has removed permissions
                return fd
    return os.open(file, flags)


def _file(folder: Path, name: str) -> Path:
    plain = "".join(character if character.isalnum() or character in "-_" else "-" for character in name)
    return folder / f"inference-card-{plain}.lock"


def _refusal(folder: Path, names: Sequence[str], count: int) -> str:
    held = [name for name in names if _is_held(_file(folder, name))]
    free = len(names) - len(held)
    holders = ", ".join(f"{name} is held by {_holder(_file(folder, name))}" for name in held)
    return (
        f"{_gpus(count)} {'is' if count == 1 else 'are'} needed, but {f'only {free}' if free else 'none'} of"
        f" {len(names)} {'are' if free > 1 else 'is'} free: {holders}; stop one of those workers, or start fewer"
    )


def _is_held(file: Path) -> bool:
    try:
        fd = _open(file)
    except OSError:
        return False
    try:
        return not _flock(fd, fcntl.LOCK_SH)
    finally:
        os.close(fd)


def _holder(file: Path) -> str:
    try:
        return file.read_text(errors="replace").strip() or "an unknown process"
    except OSError:
        return "another user's process"


def _gpus(count: int) -> str:
    return "a GPU" if count == 1 else f"{count} GPUs"


def _are(count: int) -> str:
    return {0: "is none", 1: "is one"}.get(count, f"are {count}")
