"""What `Running` needs of a request that the engine has, and of its parts there."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar, Generic, Protocol, TypeVar

from jobs.protocol.requests import Claim, Delta, Finished
from jobs.protocol.results import FinishReason
from workers.engine.messages.core import EngineRequest, TokenLogprobs
from workers.engine.messages.metrics import KINDS


class EngineSequence(Protocol):
    """What the engine has under one id: a choice of a prompt, or an input that is pooled."""

    cached_tokens: int  # of its prompt, from the prefix cache
    device_seconds: float  # that it took here, once it has ended
    ended: bool  # whether it gets no more tokens
    last_token: float  # when it got one from this worker, on the monotonic clock
    token_ids: list[int]  # its output

    @property
    def resumed(self) -> bool:
        """Whether an earlier worker began it."""

    @property
    def new_tokens(self) -> int:
        """How many this worker generated."""

    @property
    def prompt_length(self) -> int: ...

    @property
    def finish_reason(self) -> FinishReason: ...

    @property
    def length(self) -> int:
        """Tokens of its prompt and its output."""

    def take(self, token_ids: list[int], stop_token: int = -1, logprobs: list[TokenLogprobs] | None = None) -> bool:
        """Add generated tokens; return whether its text ended it."""

    def end(self, reason: FinishReason, stop_token: int = -1) -> None:
        """No more comes."""


Part = TypeVar("Part", bound=EngineSequence)


class InFlight(ABC, Generic[Part]):
    """One claimed request on its way through the engine, in parts that run under one lease.

    What only some requests have is nothing by default: tokens to publish, more to begin with later,
    another try.
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
        "system_fingerprint",
    )

    publishes: ClassVar[bool] = True  # whether there is something of it before its answer

    announced: bool  # whether anything of it was published
    next_publish: float
    sequences: list[Part]
    running: dict[int, Part]  # those that have not ended, by engine id

    def __init__(self, claim: Claim, now: float, system_fingerprint: str | None) -> None:
        """A live call arrived when the API took it, a batch line arrives `now`, on the monotonic
        clock.
        """
        created = claim.request.created
        self.claim = claim
        self.arrived = now - max(0.0, time.time() - created) if created else now
        self.kind = KINDS[not claim.live]  # its label in metrics
        self.grammar = ""  # what its outputs must follow, "" for nothing
        self.system_fingerprint = system_fingerprint

    @property
    @abstractmethod
    def started(self) -> bool:
        """Whether this worker has anything of its answer."""

    @abstractmethod
    def begin(self, grammar: str = "") -> list[EngineRequest]:
        """Return what the engine is to have at once."""

    def accepted(self) -> Delta:
        """Return the first message of a live call, before its answer."""
        key, fence, reply_to = self.claim.key, self.claim.fence, self.claim.request.reply_to
        return Delta(key, fence, self.published_tokens, [], reply_to, True, self.system_fingerprint or "")

    @abstractmethod
    def finish(self) -> Finished:
        """Return the result, once all parts have ended."""

    def device_microseconds(self) -> int:
        """Return what the parts took of the devices here."""
        return round(1e6 * sum(part.device_seconds for part in self.sequences))

    def repeat(self, claim: Claim, arrived: float) -> Finished:
        """Return the result again, as that of another claim which asks for the same: its prompts
        count as cached, and it took no time of a device.
        """
        self.claim, self.arrived = claim, arrived
        for part in self.sequences:
            part.cached_tokens, part.device_seconds = part.prompt_length, 0.0
        return self.finish()

    @property
    @abstractmethod
    def tokens_left(self) -> int:
        """How many more the part may get that may get the most; of one without tokens, how many
        parts have not ended.
        """

    @abstractmethod
    def all_have(self, tokens: int) -> bool:
        """Return whether every part that has not ended got so many tokens from this worker."""

    @property
    def pooled_tokens(self) -> int:
        """About how many tokens the parts have that are to be pooled."""
        return 0

    @property
    def fresh_tokens(self) -> int:
        """Tokens that are to be published and are not yet."""
        return 0

    @property
    def published_tokens(self) -> int:
        """Tokens that were published, by this worker or an earlier one."""
        return 0

    def delta(self) -> Delta:
        """Return what is not published yet, which counts as published from now on."""
        return Delta(self.claim.key, self.claim.fence, self.published_tokens, [], self.claim.request.reply_to)

    def follow(self, request_id: int) -> list[EngineRequest]:
        """Return what the engine is to have after the first token of a part."""
        return []

    def try_again(self, ids: Iterator[int]) -> bool:
        """Begin anew where the answer lacks its form; return whether that is so."""
        return False

    def take_prompt_logprobs(self, request_id: int, items: list[TokenLogprobs]) -> None:
        """Take the log probabilities of a part's prompt, if it asked for them."""

    def take_pooled(self, request_id: int, numbers: bytes) -> None:
        """Take what the model gave for a part, if it is to be pooled: float32, little-endian."""
