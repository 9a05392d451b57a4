"""The processes that a client starts: a whole `pipeline serve`, or an API of a fleet."""

import asyncio
import contextlib
import os
import re
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from pipeline.child import Child
from pipeline.client.errors import ServerFailed
from pipeline.errors import ChildFailed
from pipeline.options import as_flag
from pipeline.private_folder import private_folder

_STOP_SECONDS = 30.0
_POLL_SECONDS = 0.02
_LISTENING = re.compile(r"listening on (http://\S+:(\d+))")


class LocalServer:
    """Serves on a free port of this machine, for a client with `api_key`, until `stop`.

    With no `redis_url` it is a server of its own, whose files are removed at the end. The kernel
    ends it with the thread that called `start`, which also calls `check` now and then.
    """

    def __init__(self, redis_url: str | None, file_store: str | None, flags: dict[str, Any]) -> None:
        self._exit = contextlib.ExitStack()
        self._redis_url = redis_url
        self._store = file_store
        self._flags = flags
        self._port = 0
        self._url: str | None = None
        self._lines: deque[str] = deque(maxlen=5)
        self._child: Child | None = None
        self.api_key: str | None = None

    async def start(self) -> str:
        """Return the address once it listens. Raise `ServerFailed`."""
        try:
            store = self._store or self._private_store()
            environment = {"REDIS_URL": self._redis_url or "", "PIPELINE_LOG_FORMAT": "text"}
            self._child = Child("server", lambda: self._command(store), environment, self._say)
            self._child.start()
            while self._url is None:
                self.check()
                await asyncio.sleep(_POLL_SECONDS)
            return self._url
        except BaseException:
            await self.stop()
            raise

    def check(self) -> None:
        """Start it again, at the same port, if it has ended. Raise `ServerFailed`."""
        try:
            if self._child is not None:
                self._child.check()
        except ChildFailed as error:
            last = f"; its last lines: {' | '.join(self._lines)}" if self._lines else ""
            raise ServerFailed(f"the server does not run: {error.message}{last}") from None

    async def stop(self) -> None:
        """Stop the processes, and remove the files of a server of its own."""
        with self._exit:
            if self._child is None:
                return
            self._child.ask_to_stop()
            deadline = time.monotonic() + _STOP_SECONDS
            while self._child.pid is not None and time.monotonic() < deadline:
                self._child.check()
                await asyncio.sleep(_POLL_SECONDS)
            self._child.wait_until_stopped(deadline)

    def _private_store(self) -> str:
        from jobs.store.api_keys import create_key

        store = str(self._exit.enter_context(private_folder()) / "store")
        self.api_key = create_key(store, tenant="default", name="client")[1]
        return store

    def _command(self, store: str) -> list[str]:
        kind = "serve" if self._redis_url is None else "api"
        fixed = ["--host", "127.0.0.1", "--port", str(self._port), "--file-store", store]
        return [sys.executable, "-m", "pipeline", kind, *fixed, *flags_of_options(self._flags)]

    def _say(self, line: str) -> None:
        self._lines.append(line)
        if found := _LISTENING.search(line):
            self._url, self._port = found[1], int(found[2])


def flags_of_options(options: dict[str, Any]) -> list[str]:
    """Return options of Python as flags: `max_num_seqs=8` is `--max-num-seqs 8`."""
    flags: list[str] = []
    for name, value in options.items():
        if isinstance(value, bool):
            flags.append(as_flag(name) if value else as_flag(f"no_{name}"))
        elif value is not None:
            for one in value if isinstance(value, list | tuple) else (value,):
                flags += [as_flag(name), os.fspath(one) if isinstance(one, Path) else str(one)]
    return flags
