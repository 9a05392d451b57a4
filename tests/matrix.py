"""Run tests on several Redis or Valkey servers, one after the other: `python -m tests.matrix SERVER
… -- PYTEST ARGUMENTS`.

A server is the path of its binary, or a name on PATH.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from jobs.queue.connection import check_server, connect
from jobs.server import ServerError, find_server
from tests.support.redis_server import running_server

USAGE = 'usage: make matrix SERVERS="/usr/bin/redis-server /usr/bin/valkey-server"'


class MatrixOutcome(NamedTuple):
    """What came of the tests on one server."""

    server: str
    version: str
    verdict: str
    passed: bool


def main(arguments: list[str]) -> int:
    """Return 0 if the tests passed on every server, 1 if not, 2 without any server."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    servers, pytest_arguments = arguments[:at], arguments[at + 1 :]
    if not servers:
        print(USAGE, file=sys.stderr)
        return 2
    outcomes = [run_on(server, pytest_arguments) for server in servers]
    print()
    for outcome in outcomes:
        print(f"{outcome.version or 'unknown version':<18} {outcome.verdict:<28} {outcome.server}")
    return 0 if all(outcome.passed for outcome in outcomes) else 1


def run_on(server: str, pytest_arguments: list[str]) -> MatrixOutcome:
    """Run pytest with `server` as the one that every private server of a test runs."""
    binary = shutil.which(server)
    if binary is None:
        return MatrixOutcome(server, "", "not run: no such program", False)
    with tempfile.TemporaryDirectory(prefix="matrix-") as folder:
        first_on_path = Path(folder) / "valkey-server"
        first_on_path.symlink_to(Path(binary).absolute())
        with mock.patch.dict(os.environ, PATH=f"{folder}{os.pathsep}{os.environ['PATH']}"):
            try:
                version = version_of_server(first_on_path)
            except ServerError as error:
                return MatrixOutcome(server, "", f"not run: {error}", False)
            print(f"\n{version} ({server})", flush=True)
            started = time.monotonic()
            # A server's tests are run once: what may be repeated is noted by the run that asked for
            # it.
            environment = {name: value for name, value in os.environ.items() if name != "TIMED_OUT_TESTS"}
            command = [sys.executable, "-m", "pytest", "-q", *pytest_arguments]
            code = subprocess.run(command, env=environment).returncode
    verdict = f"{'passed' if code == 0 else f'failed (exit code {code})'} in {time.monotonic() - started:.0f} s"
    return MatrixOutcome(server, version, verdict, code == 0)


def version_of_server(expected: Path) -> str:
    """Return the name and version that the server itself reports.

    Raises `ServerError` where the queue cannot use it, or would not choose it.
    """
    if find_server() != expected:
        raise ServerError("older than 7.0, or no server")
    with running_server() as server, connect(server.url) as client:
        check_server(client)
        info: Any = client.info("server")
    return f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {info['redis_version']}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
