"""Compute the time without a step after which a core with requests counts as hung."""

MAX_TIMEOUT = 300.0
MIN_TIMEOUT = 20.0
STEPS = 10
"""The estimated timeout in full steps."""


class WatchdogTimeout:
    """The watchdog's timeout: configured, or estimated from the steps so far within two bounds.

    All cores of a worker share one, since the next core runs the same model on the same device: the
    last core's estimate holds until the next core has measured its own steps.
    """

    def __init__(self, configured: float | None = None) -> None:
        self._configured = configured
        self._full_step = 0.0

    @property
    def seconds(self) -> float:
        if self._configured is not None:
            return self._configured
        if not self._full_step:
            return MAX_TIMEOUT
        return min(MAX_TIMEOUT, max(MIN_TIMEOUT, STEPS * self._full_step))

    def record(self, full_step: float) -> None:
        """Record the core's estimate of a full step in seconds; 0 if it has none yet."""
        self._full_step = full_step or self._full_step
