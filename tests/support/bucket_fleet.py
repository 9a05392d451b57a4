"""A whole fleet whose file store is in a bucket."""

from tests.support.fleet import LocalFleet
from tests.support.lossy_relay import LossyRelay
from tests.support.seaweedfs import running_seaweedfs


class BucketFleet(LocalFleet):
    """Its processes reach the S3 server through a relay, and this process by itself."""

    def start_store(self) -> str:
        folder = self.folder / "s3"
        folder.mkdir()
        self.s3 = self._stack.enter_context(running_seaweedfs(folder))
        self.relay = self._stack.enter_context(LossyRelay(f"http://127.0.0.1:{self.s3.port}"))
        self.store_settings = {"AWS_ENDPOINT_URL": self.relay.url}
        return f"{self.s3.uri}/a/fleet"

    @property
    def servers(self) -> set[int]:
        return {*super().servers, self.s3.pid}
