"""Define the interface between `Running` and a request in the engine with its parts."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar, Generic, Protocol, TypeVar

from jobs.protocol.requests import Claim, Delta, Finished
from jobs.protocol.results import FinishReason
from workers.engine.messages.core import EngineRequest, LiveShare, TokenLogprobs
from workers.engine.messages.metrics import KINDS


class EngineSequence(Protocol):
    """The engine's work under one id: a choice of a prompt, or a pooled input."""

    cached_tokens: int  # prompt tokens found in the prefix cache
    device_seconds: float  # device time used by this worker, set at the end
    ended: bool  # whether it gets no more tokens
    last_token: float  # time of its newest token from this worker, on the monotonic clock
    token_ids: list[int]  # output tokens

    @property
    def resumed(self) -> bool:
        """Return whether an earlier worker began it."""

    @property
    def new_tokens(self) -> int:
        """Return how many tokens this worker generated."""

    @property
    def prompt_length(self) -> int: ...

    @property
    def finish_reason(self) -> FinishReason: ...

    @property
    def length(self) -> int:
        """Return the number of prompt and output tokens."""

    def take(self, token_ids: list[int], stop_token: int = -1, logprobs: list[TokenLogprobs] | None = None) -> bool:
        """Add generated tokens; return whether its text ended it."""

    def end(self, reason: FinishReason, stop_token: int = -1) -> None:
        """End the sequence; it gets no more tokens."""


Part = TypeVar("Part", bound=EngineSequence)


class InFlight(ABC, Generic[Part]):
    """One claimed request in the engine; its parts run under one lease.

    The defaults are for a request without tokens to publish, follow-up parts or retries.
    """

    __slots__ = (
        "announced",
        "arrived",
        "claim",
        "grammar",
        "kind",
        "next_publish",
        "running",
        "sequences",
        "share",
        "system_fingerprint",
    )

    publishes: ClassVar[bool] = True  # whether it publishes anything before its answer

    announced: bool  # whether anything of it was published
    next_publish: float
    sequences: list[Part]
    running: dict[int, Part]  # the parts that have not ended, by engine id

    def __init__(self, claim: Claim, now: float, system_fingerprint: str | None) -> None:
        """Set the arrival time on the monotonic clock: the time at which the API took a live call,
        or `now` for a batch line.
        """
        created = claim.request.created
        self.claim = claim
        self.arrived = now - max(0.0, time.time() - created) if created else now
        self.kind = KINDS[not claim.live]  # label in metrics
        key = claim.key
        self.share = LiveShare(key.tenant_mark, key.batch, claim.weight) if claim.live else None
        self.grammar = ""  # grammar of its outputs, "" for none
        self.system_fingerprint = system_fingerprint

    @property
    @abstractmethod
    def started(self) -> bool:
        """Return whether this worker has generated part of the answer."""

    @abstractmethod
    def begin(self, grammar: str = "") -> list[EngineRequest]:
        """Return the engine requests to start now."""

    def accepted(self) -> Delta:
        """Return the first message of a live call, before its answer."""
        key, fence, reply_to = self.claim.key, self.claim.fence, self.claim.request.reply_to
        return Delta(key, fence, self.published_tokens, [], reply_to, True, self.system_fingerprint or "")

    @abstractmethod
    def finish(self) -> Finished:
        """Return the result, once all parts have ended."""

    def device_microseconds(self) -> int:
        """Return the device time that the parts used on this worker."""
        return round(1e6 * sum(part.device_seconds for part in self.sequences))

    def repeat(self, claim: Claim, arrived: float) -> Finished:
        """Return the result for another claim with the same request.

        All prompt tokens count as cached, and device time is zero.
        """
        self.claim, self.arrived = claim, arrived
        for part in self.sequences:
            part.cached_tokens, part.device_seconds = part.prompt_length, 0.0
        return self.finish()

    @property
    @abstractmethod
    def tokens_left(self) -> int:
        """Return the largest number of tokens that any part may still get. For pooled requests,
        return the number of unfinished parts.
        """

    @abstractmethod
    def all_have(self, tokens: int) -> bool:
        """Return whether every unfinished part got at least `tokens` tokens from this worker."""

    @property
    def pooled_tokens(self) -> int:
        """Return the approximate number of tokens in parts that are pooled."""
        return 0

    @property
    def fresh_tokens(self) -> int:
        """Return how many tokens are due for publishing."""
        return 0

    @property
    def published_tokens(self) -> int:
        """Return how many tokens were published, by this worker or an earlier one."""
        return 0

    def delta(self) -> Delta:
        """Return the unpublished part of the answer and mark it published."""
        return Delta(self.claim.key, self.claim.fence, self.published_tokens, [], self.claim.request.reply_to)

    def follow(self, request_id: int) -> list[EngineRequest]:
        """Return the engine requests to start after the first token of a part."""
        return []

    def try_again(self, ids: Iterator[int]) -> bool:
        """Restart the request if its answer lacks the required form; return whether it
        restarted.
        """
        return False

    def take_prompt_logprobs(self, request_id: int, items: list[TokenLogprobs]) -> None:
        """Record the log probabilities of a part's prompt, if requested."""

    def take_pooled(self, request_id: int, numbers: bytes) -> None:
        """Record the model's output for a pooled part: float32, little-endian."""
