"""Configuration of an API process; every field is also an environment variable."""

from typing import Annotated

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from jobs.protocol.windows import window_seconds


class ApiSettings(BaseSettings):
    """One frozen set of values per process. Seconds and bytes unless a field says otherwise."""

    model_config = SettingsConfigDict(frozen=True, extra="ignore", env_prefix="PIPELINE_", populate_by_name=True)

    redis_url: str = Field(
        default="redis://127.0.0.1:6379/0", validation_alias="REDIS_URL", description="where the queue is"
    )
    file_store: str = Field(
        default="./store", validation_alias="FILE_STORE", description="folder of files, batches and keys"
    )
    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    insecure: bool = Field(default=False, description="answers everybody while no key exists, also beyond this machine")
    max_body_bytes: int = Field(default=32 * 1024 * 1024, gt=0, description="largest body of a live call")
    max_batch_lines: int = Field(default=50_000, gt=0, description="most requests in a batch")
    completion_windows: Annotated[tuple[str, ...], NoDecode] = Field(
        default=("24h",), description="what a batch may ask for"
    )
    ping_seconds: float = Field(default=15.0, gt=0, description="a silent event stream gets a comment this often")
    max_file_bytes: int = Field(
        default=200 * 1024 * 1024, gt=0, description="largest file of purpose batch; others may have 512 MB"
    )
    upload_silence_seconds: float = Field(
        default=60.0, gt=0, description="a body of which nothing comes for so long is given up"
    )
    watch_seconds: int = Field(
        default=60, gt=0, description="how long one watch of a batch request lasts before it is renewed"
    )

    @field_validator("completion_windows", mode="before")
    @classmethod
    def _windows(cls, value: object) -> object:
        windows = tuple(value.split()) if isinstance(value, str) else value
        if isinstance(windows, tuple):
            for window in windows:
                window_seconds(window)
        return windows
