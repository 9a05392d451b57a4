"""A whole fleet whose queue is behind Sentinels."""

from typing import Any

from tests.support.fleet import LocalFleet
from tests.support.sentinels import SentinelSet


class SentinelFleet(LocalFleet):
    """Its processes know the Sentinels alone."""

    def start_redis(self) -> str:
        folder = self.folder / "redis"
        folder.mkdir()
        self.sentinels = SentinelSet(folder, self._stack)
        return self.sentinels.url

    def worker_urls(self, url: str, workers: int) -> list[str]:
        return [url] * workers

    @property
    def servers(self) -> set[int]:
        return {one.pid for one in (*self.sentinels.servers, *self.sentinels.sentinels)}

    def history(self) -> str:
        """Return the replication id, which each new master changes, unordered failovers too: a busy
        machine answers Sentinels late.
        """
        info: Any = self.client.info("replication")
        return str(info["master_replid"])

    @property
    def clock_lead(self) -> float:
        return self.clocks["jobs"].offset
