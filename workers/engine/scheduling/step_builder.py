"""Build a step's plan and its output."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from workers.engine.messages.core import Stats, StepOutput, TokenLogprobs
from workers.engine.messages.step import AddedRequest, NewBlocks, PromptScores, StepPlan, StepResult
from workers.engine.scheduling.request import RequestState


class SlotEntry(NamedTuple):
    """The step in which a request got a slot, and whether it was the first time."""

    request: RequestState
    time: float
    first: bool


@dataclass(slots=True)
class StepBuilder:
    """Collect the rows of one `StepPlan`.

    `budget` is the number of tokens left, `outstanding` the pages that unfinished prefills still
    need; `short` means that a running request got no page. `left_out` has the requests whose
    samples do not count, because their masks were late.
    """

    number: int
    budget: int
    outstanding: int = 0
    short: bool = False
    added: list[AddedRequest] = field(default_factory=list)
    new_blocks: list[NewBlocks] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    sampling: list[RequestState] = field(default_factory=list)
    unsampled: list[RequestState] = field(default_factory=list)
    prompt_scores: list[PromptScores] = field(default_factory=list)
    scored: list[RequestState] = field(default_factory=list)
    entries: list[SlotEntry] = field(default_factory=list)
    left_out: set[int] = field(default_factory=set)

    @property
    def first_entries(self) -> list[RequestState]:
        """Return the requests that never had a slot before."""
        return [entry.request for entry in self.entries if entry.first]

    def build(self) -> StepPlan:
        return StepPlan(
            step=self.number,
            added=self.added,
            new_blocks=self.new_blocks,
            slots=np.array(self.slots, dtype=np.int32),
            starts=np.array(self.starts, dtype=np.int32),
            counts=np.array(self.counts, dtype=np.int32),
            samples=np.array(self.samples, dtype=np.int32),
            prompt_scores=self.prompt_scores,
        )


@dataclass(slots=True)
class OutputBuilder:
    """Collect one `StepOutput`; continuing requests have one token each.

    Until the first entry of a request, here or in a later output, `fresh_hits` has its prompt
    tokens from the cache, and `fresh_scores` the prompt's log probabilities so far. `fresh_starts`
    has the steps in which it got a slot, until its next entry.
    """

    request_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    ended: list[tuple[int, RequestState, int, int]] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    fresh_hits: dict[int, int] = field(default_factory=dict)
    fresh_scores: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    fresh_starts: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    pooled: dict[int, bytes] = field(default_factory=dict)
    device_seconds: dict[int, float] = field(default_factory=dict)

    def take_logprobs(self, launched: StepBuilder, result: StepResult) -> None:
        for index, logprobs in result.logprobs.items():
            request = launched.sampling[index]
            if not request.finish and request.id not in launched.left_out:
                self.logprobs[request.id] = [logprobs]
        for request, scores in zip(launched.scored, result.prompt_logprobs, strict=True):
            if not request.finish:
                self.fresh_scores[request.id] += scores

    def start(self, request: RequestState, step: int, now: float) -> None:
        """Record when a request got a slot, if it asked for it."""
        if request.timed:
            self.fresh_starts.setdefault(request.id, []).append((step, now))

    def undo_start(self, request: RequestState) -> None:
        """Remove the last start of a request whose step was not launched."""
        if starts := self.fresh_starts.get(request.id):
            starts.pop()

    def end(self, request: RequestState, stop_token: int, error: str = "", token: int | None = None) -> None:
        self.ended.append((len(self.request_ids), request, stop_token, int(token is not None)))
        self.request_ids.append(request.id)
        if token is not None:
            self.token_ids.append(token)
        if request.device_seconds:
            self.device_seconds[request.id] = request.device_seconds
        if error:
            self.errors[request.id] = error

    def following(self) -> "OutputBuilder":
        """Return the builder of the next output."""
        return OutputBuilder(fresh_hits=self.fresh_hits, fresh_scores=self.fresh_scores, fresh_starts=self.fresh_starts)

    def build(self, step: int, stats: Stats) -> StepOutput:
        """Return the output; the scores of requests that ended without a token are dropped."""
        rows = len(self.request_ids)
        counts, finish, stop_token, cached_tokens = [1] * rows, [0] * rows, [-1] * rows, [0] * rows
        for index, request, stop, count in self.ended:
            counts[index] = count
            finish[index] = int(request.finish)
            stop_token[index] = stop
        if self.fresh_hits:
            cached_tokens = [self.fresh_hits.pop(request_id, 0) for request_id in self.request_ids]
        scores: dict[int, list[TokenLogprobs]] = {}
        if self.fresh_scores:
            for request_id, count in zip(self.request_ids, counts, strict=True):
                whole = self.fresh_scores.pop(request_id, None)
                if whole is not None and count:
                    scores[request_id] = whole
        starts: dict[int, list[tuple[int, float]]] = {}
        if self.fresh_starts:
            starts = {each: self.fresh_starts.pop(each) for each in self.request_ids if each in self.fresh_starts}
        return StepOutput(
            step,
            self.request_ids,
            counts,
            self.token_ids,
            finish,
            stop_token,
            cached_tokens,
            stats,
            self.errors,
            self.logprobs,
            scores,
            starts,
            self.pooled,
            self.device_seconds,
        )
