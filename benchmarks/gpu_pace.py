"""The pace of a worker with a GPU: the number of lines in each of its calls to Redis, from the
figures of `docs/gpu.md` and the intervals of the worker process.
"""

from dataclasses import dataclass
from typing import NamedTuple

from jobs.queue.scripts import MAX_ITEMS
from jobs.queue.settings import QueueSettings
from workers.replica.outbox import BACKLOG_SECONDS

_STREAM_INTERVAL = QueueSettings.from_environment().stream_interval
SWEEP_SECONDS = _STREAM_INTERVAL / 8
"""Seconds between two checks for due tokens."""
_PUBLISHED_TOGETHER = 32


class LinesPerCall(NamedTuple):
    """The number of lines in one call of a worker, by call."""

    claim: int
    publish: int
    commit: int


@dataclass(frozen=True, slots=True)
class GpuPace:
    """A GPU's output tokens per second, and its number of concurrent requests."""

    model: str
    tokens_per_second: int
    slots: int

    def lines_per_second(self, tokens: int) -> float:
        """Return the lines of `tokens` output tokens that end in a second."""
        return self.tokens_per_second / tokens

    def seconds(self, tokens: float) -> float:
        """Return the seconds that one request takes for `tokens` tokens."""
        return tokens * self.slots / self.tokens_per_second

    @property
    def tokens_of_a_publish(self) -> int:
        """Tokens of a request that are published at once."""
        return round(_STREAM_INTERVAL / self.seconds(1))

    def published(self, tokens: int) -> int:
        """Return the number of a line's tokens that are published before its end."""
        return (tokens - 1) // self.tokens_of_a_publish * self.tokens_of_a_publish

    def groups(self, tokens: int) -> LinesPerCall:
        """Return the lines of `tokens` tokens that are claimed, published and committed at once."""
        due = self.slots * SWEEP_SECONDS / _STREAM_INTERVAL
        ended = self.lines_per_second(tokens) * BACKLOG_SECONDS
        return LinesPerCall(
            self.slots // 16, min(_PUBLISHED_TOGETHER, round(due)), max(1, min(MAX_ITEMS, round(ended)))
        )


QWEN3_06B = GpuPace("Qwen3-0.6B", 20_656, 256)
QWEN3_8B = GpuPace("Qwen3-8B", 12_180, 1024)
