"""Configuration of everything that talks to the queue; every field is also an environment variable of the same name."""

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class QueueSettings(BaseSettings):
    """One frozen set of values per process. Seconds and bytes unless a field says otherwise."""

    model_config = SettingsConfigDict(frozen=True, extra="ignore")

    redis_url: str | None = Field(default=None, description="redis://, rediss:// or unix:// URL; none starts a private server")
    lease_seconds: float = Field(default=30.0, gt=0, description="how long a claim lasts without being renewed")
    stream_interval: float = Field(default=2.0, gt=0, description="seconds between the checkpoints of a request that nobody watches")
    redis_retry_seconds: float = Field(default=20.0, ge=0, description="how long one call tries again while Redis cannot answer")
    file_store: str = Field(default="./store", description="folder under which files, manifests, parts and outputs stand")
    window_bytes: int = Field(default=64 * 1024 * 1024, gt=0, description="request bodies of one batch that stand in Redis at once")
    undrained_bytes: int = Field(
        default=64 * 1024 * 1024, gt=0, description="results of one batch in Redis above which none of its lines start"
    )
    worker_deaths: int = Field(
        default=1000, gt=0, description="lost workers after which a request ends with the error worker_lost; machines die, requests do not"
    )
    ended_batch_seconds: int = Field(
        default=30 * 24 * 3600, gt=0, description="how long the queue knows a batch that ended; its files stay"
    )
    stream_keep_seconds: int = Field(default=300, gt=0, description="how long a finished token stream can still be read")
