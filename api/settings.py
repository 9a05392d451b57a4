"""Settings of an API process: its queue, its HTTP server, and what it serves."""

from dataclasses import dataclass

from api.http_settings import HttpSettings
from jobs.protocol.windows import window_seconds
from jobs.settings import setting


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ApiSettings(HttpSettings):
    """One frozen set of values per process."""

    expected_models: tuple[str, ...] = setting(
        (),
        "Model that counts as loading while no worker has registered it; may be repeated. `serve` names its own.",
        flag="expected-model",
    )
    load_timeout: float = setting(
        300.0,
        "Seconds for which a live call waits for a model that is loaded on demand; then it is answered 503.",
        min=1,
    )
    timeout_graceful_shutdown: int = setting(
        10, "Seconds for running calls to end after SIGTERM; those of `serve` get 10.", min=1
    )
    completion_windows: tuple[str, ...] = setting(
        ("24h",),
        "How long a batch may take, as 24h, 30m or 10s; may be repeated, and a batch names one of them.",
        flag="completion-window",
        check=window_seconds,
    )
    max_batch_lines: int = setting(50_000, "Most requests in a batch.", above=0, kind="size")
    strict_parameters: bool = setting(
        False, "Refuse lines of batches whose bodies have members that are no parameters."
    )
    max_file_bytes: int = setting(200 * 2**20, "Largest input file of a batch.", above=0, kind="size")
    max_body_bytes: int = setting(32 * 2**20, "Largest body of a live call, in bytes.", above=0, flag=None)
    body_memory_bytes: int = setting(
        256 * 2**20,
        "Memory for bodies of requests until their answers, in bytes, but at least two of the largest live calls; a key"
        " may take half.",
        above=0,
        flag=None,
    )
    ping_seconds: float = setting(15.0, "Seconds after which a silent event stream gets a comment.", above=0, flag=None)
    upload_silence_seconds: float = setting(
        60.0, "Seconds without a byte after which a request's body is given up.", above=0, flag=None
    )
    watch_seconds: int = setting(
        60, "Seconds that one watch of a request lasts before it is renewed.", above=0, flag=None
    )
