"""Loaded by every Python process whose PYTHONPATH names this folder: takes away what Python on
macOS lacks, as far as this product has a use for it.
"""

import ctypes
import mmap
import os
import select
import signal
import socket
import sys

_OF_LINUX = {
    os: "eventfd eventfd_read eventfd_write memfd_create pidfd_open sched_getaffinity sched_setaffinity"
    " posix_fallocate posix_fadvise copy_file_range splice fdatasync pipe2 getrandom O_TMPFILE O_PATH O_LARGEFILE"
    " listxattr getxattr setxattr",
    signal: "sigtimedwait sigwaitinfo pidfd_send_signal",
    select: "epoll",
    socket: "SO_PEERCRED SOCK_CLOEXEC SOCK_NONBLOCK TCP_USER_TIMEOUT TCP_QUICKACK",
    mmap: "MADV_HUGEPAGE MAP_POPULATE",
}
_FUNCTIONS = ("prctl", "malloc_trim", "mallopt", "eventfd", "memfd_create", "pidfd_open")

for _module, _names in _OF_LINUX.items():
    for _name in _names.split():
        vars(_module).pop(_name, None)

_find = ctypes.CDLL.__getattr__


def _find_portable(library: ctypes.CDLL, name: str) -> object:
    if name in _FUNCTIONS:
        raise AttributeError(f"macOS has no {name}")
    return _find(library, name)


def _refuse_proc(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and isinstance(arguments[0], str) and arguments[0].startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(2, "macOS has no such file", arguments[0])


sys.modules["uvloop"] = None  # type: ignore[assignment]
ctypes.CDLL.__getattr__ = _find_portable  # type: ignore[assignment,method-assign]
sys.addaudithook(_refuse_proc)
