"""Servers behind Sentinel: a master, a replica and three Sentinels, all processes that can be
killed.
"""

import math
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import redis

from jobs.process import die_with_parent
from jobs.server import find_server
from tests.support.ports import reserved_port
from tests.support.waiting import wait_until

SERVICE = "queue"
DOWN_MILLISECONDS = 1000
FAILOVER_SECONDS = 10.0
"""Sentinels that took an order have another master within this time."""
START_SECONDS = 60


class ServerProcess:
    """A server or a Sentinel on a port of its own, which can be killed and started again."""

    def __init__(self, folder: Path, port: int, *arguments: object) -> None:
        folder.mkdir()
        self.port = port
        self.client = redis.Redis(port=port, decode_responses=True)
        self._folder = folder
        self._command = [str(part) for part in (find_server(), *arguments, "--port", port, "--dir", folder)]
        self.start()

    def start(self) -> None:
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, preexec_fn=partial(die_with_parent, os.getpid())
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except redis.RedisError:
            return False

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class SentinelSet:
    """Belongs to the thread that made it: the kernel ties processes to their thread."""

    def __init__(self, folder: Path, stack: ExitStack, options: Sequence[str] = ()) -> None:
        ports = [stack.enter_context(reserved_port()) for _ in range(5)]
        stack.callback(self.stop)
        self.servers: list[ServerProcess] = []
        self.sentinels: list[ServerProcess] = []
        server_options = ("--appendonly", "yes", "--save", "", "--repl-diskless-sync-delay", 0, *options)
        for number, port in enumerate(ports[:2]):
            following = ("--replicaof", f"127.0.0.1 {ports[0]}") if number else ()
            self.servers.append(ServerProcess(folder / f"server-{number}", port, *server_options, *following))
        for number, port in enumerate(ports[2:]):
            self.sentinels.append(self._sentinel(folder, number, port, ports[0]))
        self.wait_whole()

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{hosts}/{SERVICE}/0"

    @property
    def master(self) -> ServerProcess:
        """The one that most Sentinels name."""
        named = [one.client.sentinel_get_master_addr_by_name(SERVICE) for one in self.sentinels]
        ports = [address[1] for address in named if address]
        return next(server for server in self.servers if ports.count(server.port) * 2 > len(self.sentinels))

    def wait_whole(self) -> None:
        """Until the Sentinels know each other and a replica that follows the master, so that they
        can make it the next master.
        """
        for one in (*self.servers, *self.sentinels):
            wait_until(one.answers, START_SECONDS, f"an answer on port {one.port}")
        for one in self.sentinels:  # they look for replicas each 10 s, and for each other each 2 s
            one.client.execute_command("SENTINEL", "DEBUG", "INFO-PERIOD", 200, "PUBLISH-PERIOD", 200)
        wait_until(self.is_whole, START_SECONDS, "a replica that follows, and Sentinels that agree")

    def fail_over(self) -> None:
        """By order, with the old master alive; Sentinels of a machine that stood still may give an
        order up, and get it again.
        """
        before, ordered_at = self.master, -math.inf

        def look() -> bool:
            nonlocal ordered_at
            if self.master is not before:
                return True
            if time.monotonic() - ordered_at > FAILOVER_SECONDS and self.order_failover():
                ordered_at = time.monotonic()
            return False

        wait_until(look, START_SECONDS, "another master")

    @contextmanager
    def without_failovers(self) -> Iterator[None]:
        """Meanwhile the Sentinels take no server for down, and so fail over by order alone."""
        self._set_down(START_SECONDS * DOWN_MILLISECONDS)
        try:
            yield
        finally:
            self._set_down(DOWN_MILLISECONDS)

    def _set_down(self, milliseconds: int) -> None:
        for one in self.sentinels:
            one.client.sentinel_set(SERVICE, "down-after-milliseconds", milliseconds)

    def kill_master(self) -> ServerProcess:
        """Return it once another is the master."""
        before = self.master
        before.kill()
        wait_until(lambda: self.master is not before, START_SECONDS, "another master")
        return before

    def stop(self) -> None:
        for one in (*self.sentinels, *self.servers):
            one.kill()

    def order_failover(self) -> bool:
        """Return whether it begins: not right after another, or without a replica that is ready."""
        try:
            return bool(self.sentinels[0].client.sentinel_failover(SERVICE))
        except redis.ResponseError:
            return False

    def is_whole(self) -> bool:
        """Return whether the Sentinels could make another server the master now."""
        try:
            return self._is_whole()
        except redis.RedisError:
            return False

    def _is_whole(self) -> bool:
        master, following = self.master, [one for one in self.servers if one is not self.master]
        states: list[Any] = [one.client.sentinel_master(SERVICE) for one in self.sentinels]
        known = all(state["num-slaves"] == 1 and state["num-other-sentinels"] == 2 for state in states)
        flagged = any("down" in state["flags"] for state in states)
        about: list[Any] = [one.client.info("replication") for one in following]
        linked = all((one.get("master_link_status"), one.get("master_port")) == ("up", master.port) for one in about)
        return known and linked and not flagged

    def _sentinel(self, folder: Path, number: int, port: int, master: int) -> ServerProcess:
        """Its file is written anew by itself, and so has to be there."""
        file = folder / f"sentinel-{number}.conf"
        file.write_text(
            f"sentinel monitor {SERVICE} 127.0.0.1 {master} 2\n"
            f"sentinel down-after-milliseconds {SERVICE} {DOWN_MILLISECONDS}\n"
            f"sentinel failover-timeout {SERVICE} 5000\n"
        )
        return ServerProcess(folder / f"sentinel-{number}", port, file, "--sentinel")


@contextmanager
def running_process(folder: Path, port: int, *arguments: object) -> Iterator[ServerProcess]:
    """One server alone that answers."""
    process = ServerProcess(folder, port, *arguments)
    try:
        wait_until(process.answers, START_SECONDS, f"an answer on port {port}")
        yield process
    finally:
        process.kill()


@contextmanager
def running_sentinels(*options: str) -> Iterator[SentinelSet]:
    """A set with these `options` for its servers, gone with its files at the end."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sentinels-")))
        yield SentinelSet(folder, stack, options)
