"""The process that a client starts: `pipeline serve`, or `pipeline api` for a fleet."""

import asyncio
import contextlib
import os
import socket
import time
from pathlib import Path
from typing import Any

from batch_inference_pipeline.command_process import CommandProcess
from batch_inference_pipeline.errors import ServerFailed
from batch_inference_pipeline.private_folder import private_folder, socket_folder

_START_SECONDS = 300.0
_STOP_SECONDS = 30.0
_POLL_SECONDS = 0.02
# Certificates set by environment variables or a config file belong to another server
_NO_TLS = ["--ssl-certfile", "", "--ssl-keyfile", "", "--ssl-ca-certs", "", "--ssl-cert-reqs", "0"]
_SENDING = {
    "otlp_traces_endpoint": "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "webhook_url": "PIPELINE_WEBHOOK_URL",
    "config": "PIPELINE_CONFIG",
}
"""Flags, with their variables, that may make a process send data elsewhere before it ends."""


class LocalServer:
    """Serves at the Unix socket `uds`, in a private folder, until `stop`.

    Without `redis_url` it is a private server, and its files are removed at the end. The kernel
    kills it when the thread that called `start` ends. The same thread must call `check`
    regularly.
    """

    def __init__(self, redis_url: str | None, file_store: str | None, flags: dict[str, Any]) -> None:
        self._exit = contextlib.ExitStack()
        self._redis_url = redis_url
        self._store = file_store
        self._flags = flags
        self._process: CommandProcess | None = None
        self.uds = ""

    def start(self) -> None:
        """Start the process."""
        folder = self._exit.enter_context(private_folder())
        self.uds = str(socket_folder(folder, self._exit) / "api.sock")
        environment = {"REDIS_URL": self._redis_url or "", "PIPELINE_LOG_FORMAT": "text"}
        self._process = CommandProcess(self._arguments(self._store or str(folder / "store")), environment)
        self._process.start()

    async def wait_until_listening(self) -> None:
        """Wait until the server accepts connections. Raise `ServerFailed`."""
        deadline = time.monotonic() + _START_SECONDS
        while not _accepts(self.uds):
            self.check()
            if time.monotonic() > deadline:
                last = "" if self._process is None else self._process.last_lines
                raise ServerFailed(f"the server did not start listening within {_START_SECONDS:.0f} s{last}")
            await asyncio.sleep(_POLL_SECONDS)

    def check(self) -> None:
        """Restart the server if it was killed. Raise `ServerFailed`."""
        if self._process is not None:
            self._process.check()

    async def stop(self) -> None:
        """Stop the processes, and remove the files of a private server."""
        with self._exit:
            if self._process is None:
                return
            # The state of a private server is not kept
            self._process.ask_to_stop(at_once=self._redis_url is None and not self._may_send)
            deadline = time.monotonic() + _STOP_SECONDS
            while not self._process.has_ended and time.monotonic() < deadline:
                await asyncio.sleep(_POLL_SECONDS)
            self._process.end()

    def _arguments(self, store: str) -> list[str]:
        kind = "serve" if self._redis_url is None else "api"
        return [kind, "--uds", self.uds, "--file-store", store, *_NO_TLS, *flags_of_options(self._flags)]

    @property
    def _may_send(self) -> bool:
        return any(self._flags.get(name) or os.environ.get(variable) for name, variable in _SENDING.items())


def _accepts(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
        probe.connect(path)
        return True
    return False


def flags_of_options(options: dict[str, Any]) -> list[str]:
    """Return Python options as flags: `max_num_seqs=8` becomes `--max-num-seqs 8`."""
    flags: list[str] = []
    for name, value in options.items():
        if isinstance(value, bool):
            flags.append(_flag(name) if value else _flag(f"no_{name}"))
        elif value is not None:
            for one in value if isinstance(value, list | tuple) else (value,):
                flags += [_flag(name), os.fspath(one) if isinstance(one, Path) else str(one)]
    return flags


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
