"""Configuration of every process that uses the queue.

Few imports, since every process loads this first.
"""

from dataclasses import dataclass, fields
from functools import partial

from jobs.errors import SettingsError
from jobs.queue.webhook_settings import check_webhook_secret, check_webhook_url, read_secret_key, secret_key
from jobs.settings import Settings, setting, variable
from jobs.tracing import check_endpoint

_setting = partial(setting, prefix="")


def _check_model_name(name: str) -> None:
    """Raise ValueError for a name with spaces: the environment variable separates names by them."""
    if name.split() != [name]:
        raise ValueError(f"{name!r} has spaces: give the model a --served-model-name without")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class QueueSettings(Settings):
    """One frozen set of values per process. Seconds and bytes unless the help says otherwise."""

    redis_url: str | None = _setting(None, "redis://, rediss://, unix:// or redis+sentinel:// URL of the queue.")
    file_store: str = _setting(
        "./store",
        "Folder of files, batches and API keys, or the s3://BUCKET/PREFIX of an object store; one and the same for"
        " every `pipeline api` and `pipeline jobs` of a fleet.",
    )
    rq_db: int | None = _setting(
        None,
        "Number of the Redis database for RQ's jobs, where another RQ application uses the queue's own; one and the"
        " same in a fleet.",
        min=0,
    )
    lease_seconds: float = _setting(
        30.0, "Seconds for which a worker's claim on a request holds without being renewed.", min=0.2
    )
    stream_interval: float = _setting(
        2.0, "Seconds between the checkpoints of a request that no client watches.", min=0.02
    )
    on_demand_models: tuple[str, ...] = setting(
        (),
        "Model whose workers an autoscaler starts while requests wait for it; may be repeated, the same for every"
        " `pipeline api` and `pipeline jobs`. Live calls and batches may name it even with no worker.",
        flag="on-demand-model",
        check=_check_model_name,
    )
    otlp_traces_endpoint: str | None = setting(
        None,
        "URL to which OpenTelemetry traces go, as http://collector:4318/v1/traces; it needs the extra `tracing`."
        " [default: no traces]",
        prefix="OTEL_EXPORTER_",
        check=check_endpoint,
    )
    webhook_url: str | None = setting(
        None,
        "URL to notify when a batch of the API ends, as https://example.com/webhooks; needs a secret."
        " [default: no webhooks]",
        check=check_webhook_url,
    )
    webhook_secret_file: str | None = setting(
        None, "File with the secret that webhooks are signed with, `whsec_` and base64."
    )
    webhook_secret: str | None = setting(
        None, "The same secret itself; it wins over the file.", flag=None, check=check_webhook_secret
    )
    redis_retry_seconds: float = _setting(
        20.0, "Seconds for which one call retries while Redis cannot answer.", min=0, flag=None
    )
    window_bytes: int = _setting(
        64 * 1024 * 1024, "Request bodies of one batch that Redis holds at once, in bytes.", above=0, flag=None
    )
    undrained_bytes: int = _setting(
        64 * 1024 * 1024,
        "Results of a batch in Redis, in bytes, above which none of its lines start.",
        above=0,
        flag=None,
    )
    live_calls_per_tenant: int = _setting(
        5_000, "Live calls of one tenant that wait or run at once.", above=0, flag=None
    )
    live_bytes_per_tenant: int = _setting(
        128 * 1024 * 1024, "Bodies of a tenant's live calls that Redis holds at once, in bytes.", above=0, flag=None
    )
    live_calls_per_model: int = _setting(
        10_000, "Live calls for one model that wait or run at once.", above=0, flag=None
    )
    live_bytes_per_model: int = _setting(
        256 * 1024 * 1024,
        "Bodies of the live calls for one model that Redis holds at once, in bytes.",
        above=0,
        flag=None,
    )
    worker_deaths: int = _setting(1000, "Lost workers after which a request ends with an error.", above=0, flag=None)
    ended_batch_seconds: int = _setting(
        30 * 24 * 3600, "Seconds for which the queue knows an ended batch; its files stay.", above=0, flag=None
    )
    lost_batch_seconds: float = _setting(
        600.0,
        "Seconds for which the folder of a batch, or its manifest, may be gone before the batch fails.",
        min=0,
        flag=None,
    )
    stream_keep_seconds: int = _setting(
        300, "Seconds for which a finished token stream can still be read.", above=0, flag=None
    )
    stream_keep_bytes: int = _setting(
        128 * 1024 * 1024,
        "Finished token streams of live calls that Redis keeps, in bytes; the oldest go first, none within a minute.",
        above=0,
        flag=None,
    )

    def webhook_key(self) -> bytes | None:
        """Return the key that webhooks are signed with, or None if there are no webhooks.

        Raise `SettingsError`.
        """
        if self.webhook_url is None:
            return None
        if self.webhook_secret is not None:
            return secret_key(self.webhook_secret)
        if self.webhook_secret_file is None:
            raise SettingsError(
                "PIPELINE_WEBHOOK_URL needs a secret: set PIPELINE_WEBHOOK_SECRET_FILE or PIPELINE_WEBHOOK_SECRET"
            )
        return read_secret_key(self.webhook_secret_file)

    def environment(self) -> dict[str, str]:
        """Return the environment variables that give another process the same settings."""
        values = ((variable(one), getattr(self, one.name)) for one in fields(QueueSettings))
        return {
            name: " ".join(value) if isinstance(value, tuple) else str(value)
            for name, value in values
            if value is not None
        }
