"""A whole fleet whose queue is behind Sentinels."""

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

    @property
    def clock_lead(self) -> float:
        return self.clocks["jobs"].offset
