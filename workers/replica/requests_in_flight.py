"""Track one claimed request in the engine: the choices of all its prompts, and its result."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from jobs.protocol.endpoint import AnswerHead
from jobs.protocol.requests import ChoiceCheckpoint, Claim, Delta, Finished, TokenChunk
from jobs.protocol.results import (
    ApiError,
    Choice,
    PositionLogprobs,
    Result,
    TokenLogprob,
    Usage,
    encode_json,
    new_request_id,
)
from workers.engine.messages.core import EngineRequest, OutputGuide, TokenLogprobs
from workers.replica.checked_answers import has_form
from workers.replica.in_flight import InFlight
from workers.replica.parsed_text import ParsedText
from workers.replica.prepared import PreparedRequest
from workers.replica.sequence import Sequence, at_most, positions


class _EncodedAnswer(NamedTuple):
    """The encoded body of an answer, and the inputs besides the choices that it was made from."""

    head: AnswerHead
    usage: Usage
    raw: bytes


class RequestInFlight(InFlight[Sequence]):
    """Run all choices of a request under one lease, numbered prompt by prompt.

    For each prompt, the first unfinished choice goes first: it computes the prompt, and the
    prompt's log probabilities come with its first token. The other choices then find the prompt in
    the prefix cache.
    """

    __slots__ = (
        "_at_once",
        "_call",
        "_guide",
        "_last_body",
        "_parsing",
        "_prompt_logprobs",
        "_prompts",
        "_published",
        "_spent",
        "_tokenizer",
        "_tries_left",
        "waiting",
    )

    def __init__(self, prepared: PreparedRequest, ids: Iterator[int], now: float, stream_interval: float) -> None:
        """Take an engine id for each choice that needs the engine.

        The first tokens are due after `stream_interval` seconds from `now`, on the monotonic clock.
        """
        super().__init__(prepared.claim, now, prepared.system_fingerprint)
        # Whether any of its tokens were published
        self.announced = prepared.claim.checkpoint is not None
        self.next_publish = now + stream_interval
        self.running: dict[int, Sequence] = {}  # by engine id
        self.waiting: dict[
            int, list[EngineRequest]
        ] = {}  # engine requests to submit later, by the id of the choice that goes first
        self._at_once: list[EngineRequest] = []
        self._call = prepared.call
        self._prompts = prepared.prompts
        self._published = 0  # fence of the lease of the last published tokens
        self._tokenizer = prepared.tokenizer
        self._guide = prepared.guide
        self._parsing = prepared.parsing
        self._prompt_logprobs: dict[int, list[PositionLogprobs]] = {}
        self._tries_left = prepared.retries
        self._spent: Usage | None = None  # usage of earlier tries
        self._last_body: _EncodedAnswer | None = None
        self.sequences = self._make_sequences({} if self.claim.checkpoint is None else self.claim.checkpoint.choices)
        for number in range(len(self._prompts)):
            self._line_up(number, ids)

    @property
    def fresh_tokens(self) -> int:
        """Return how many tokens are due for publishing; those of a second try are never due."""
        if self._spent is not None:
            return 0
        fresh = 0
        for sequence in self.sequences:
            fresh += len(sequence.token_ids) - sequence.published_tokens
        return fresh

    @property
    def started(self) -> bool:
        """Return whether this worker generated any of its tokens."""
        return any(sequence.started for sequence in self.sequences)

    def all_have(self, tokens: int) -> bool:
        """Return whether every unfinished choice got at least `tokens` tokens from this worker."""
        return all(sequence.new_tokens >= tokens for sequence in self.running.values())

    @property
    def tokens_left(self) -> int:
        """Return the largest number of tokens that any choice may still get."""
        return max((sequence.tokens_left for sequence in self.running.values()), default=0)

    def begin(self, grammar: str = "") -> list[EngineRequest]:
        """Return the engine requests to start now; `grammar` constrains each output, "" for
        none.
        """
        added, self._at_once, self.grammar = self._at_once, [], grammar
        if grammar:
            for request in itertools.chain(added, *self.waiting.values()):
                if not self.running[request.request_id].ended:
                    request.guide = msgspec.structs.replace(request.guide or OutputGuide(), grammar=grammar)
        return added

    def try_again(self, ids: Iterator[int]) -> bool:
        """Restart with another seed if an ended answer lacks its form and tries are left.

        Returns whether it restarted; then the engine needs the result of `begin`. Another worker
        restarts from the end of the first try too, since later tries are not published.
        """
        form = self._call.output_format
        if self._tries_left < 1 or form is None or all(has_form(one.content, form) for one in self.sequences):
            return False
        self._tries_left -= 1
        self._spent = self._usage()
        self._prompts = [prompt.with_next_seed() for prompt in self._prompts]
        self.waiting.clear()
        self.sequences = self._make_sequences({})
        for number in range(len(self._prompts)):
            self._line_up(number, ids)
        return True

    def follow(self, request_id: int) -> list[EngineRequest]:
        """Return the engine requests to start after the first token of `request_id`."""
        return self.waiting.pop(request_id, [])

    def take_prompt_logprobs(self, request_id: int, items: list[TokenLogprobs]) -> None:
        """Record the prompt's log probabilities: one item per token from the second on."""
        number = self.running[request_id].number // self._call.best_of
        token_bytes = self._tokenizer.token_bytes
        start = self._prompts[number].token_ids[0]
        begin = PositionLogprobs(TokenLogprob(start, token_bytes(start), None, 0), [])
        self._prompt_logprobs[number] = [begin, *positions(items, token_bytes)]

    @property
    def published_tokens(self) -> int:
        """Return how many tokens were published, by this worker or an earlier one."""
        return sum(sequence.published_tokens for sequence in self.sequences)

    def delta(self) -> Delta:
        """Return the unpublished part of the answer and mark it published."""
        chunks: list[TokenChunk] = []
        total = 0
        for sequence in self.sequences:
            first = not sequence.announced
            chunk = sequence.chunk()
            if chunk is not None:
                if first:
                    chunk.prompt_logprobs = self._echoed(sequence)
                chunks.append(chunk)
            total += sequence.published_tokens
        self.announced = True
        key, fence = self.claim.key, self.claim.fence
        continues, self._published = self._published == fence, fence
        return Delta(key, fence, total, chunks, self.claim.request.reply_to, continues=continues)

    def finish(self) -> Finished:
        """Return the result, once all choices have ended."""
        usage = self._usage()
        result = Result(200, self._body(usage), usage, new_request_id())
        delta = None if self._spent is not None else self.delta()
        return Finished(self.claim.key, self.claim.fence, result, delta, self.claim.request.reply_to)

    def repeat(self, claim: Claim, arrived: float) -> Finished:
        """Return the result for a copy, with all tokens: none of this claim is published yet."""
        self.announced = False
        for sequence in self.sequences:
            sequence.unpublish(f"{claim.key}/{sequence.number}")
        if self._spent is not None:
            cached = self._spent.prompt_tokens
            self._spent = msgspec.structs.replace(self._spent, cached_tokens=cached, device_microseconds=0)
        return super().repeat(claim, arrived)

    def _body(self, usage: Usage) -> bytes:
        """Return the body of the answer.

        Encoding many log probabilities takes milliseconds, so the last body is reused. Bodies of
        copies differ only in their ids, unless tool calls have ids too or a second has passed.
        """
        call, created = self._call, int(self.claim.request.created or time.time())
        head = AnswerHead(call.endpoint.new_id(), call.model, created, self.system_fingerprint, call.service_tier)
        last = self._last_body
        if last is not None and self._parsing is None and (head._replace(id=last.head.id), usage) == last[:2]:
            return last.raw.replace(last.head.id.encode(), head.id.encode(), 1)  # a body begins with its id
        raw = encode_json(call.endpoint.body(head, self._choices(), usage))
        self._last_body = _EncodedAnswer(head, usage, raw)
        return raw

    def _choices(self) -> list[Choice]:
        n = self._call.n
        return [
            sequence.choice(prompt * n + rank, self._prompt_logprobs.get(prompt))
            for prompt in range(len(self._prompts))
            for rank, sequence in enumerate(self._best_of(prompt))
        ]

    def _usage(self) -> Usage:
        """Return the usage of all tries."""
        before = self._spent or Usage()
        reasoning = self._reasoning_tokens()
        return Usage(
            before.prompt_tokens + sum(len(prompt.token_ids) for prompt in self._prompts),
            before.completion_tokens + sum(len(sequence.token_ids) for sequence in self.sequences),
            before.cached_tokens + sum(sequence.cached_tokens for sequence in self.sequences[:: self._call.best_of]),
            None if reasoning is None else reasoning + (before.reasoning_tokens or 0),
            before.device_microseconds + self.device_microseconds(),
        )

    def _reasoning_tokens(self) -> int | None:
        if self._parsing is None or self._parsing.reasoning_ends is None:
            return None
        return sum(sequence.reasoning_tokens for sequence in self.sequences)

    def _make_sequences(self, published: Mapping[int, ChoiceCheckpoint]) -> list[Sequence]:
        call = self._call
        return [
            Sequence(number, prompt, call, self._tokenizer, published.get(number), self._parsed_text(number))
            for first, prompt in enumerate(self._prompts)
            for number in range(first * call.best_of, (first + 1) * call.best_of)
        ]

    def _parsed_text(self, number: int) -> ParsedText | None:
        if self._parsing is None:
            return None
        return ParsedText(self._parsing, self._call, f"{self.claim.key}/{number}")

    def _line_up(self, prompt: int, ids: Iterator[int]) -> None:
        """Create the engine requests of a prompt's unfinished choices.

        If all have ended but the prompt's log probabilities are needed, create that of the first
        choice.
        """
        sequences = self._choices_of(prompt)
        needs_prompt = self._prompts[prompt].sampling.prompt_logprobs >= 0
        left = [sequence for sequence in sequences if not sequence.ended] or sequences[:needs_prompt]
        requests: list[EngineRequest] = []
        live, batch_id = self.claim.live, "" if self.claim.live else self.claim.key.batch
        for sequence in left:
            scored = needs_prompt and not requests
            requests.append(
                sequence.engine_request(
                    next(ids),
                    live=live,
                    with_prompt_logprobs=scored,
                    batch_id=batch_id,
                    arrived=self.arrived,
                    guide=self._guide,
                    share=self.share,
                )
            )
            self.running[requests[-1].request_id] = sequence
        if requests:
            self._at_once.append(requests[0])
            if len(requests) > 1:
                self.waiting[requests[0].request_id] = requests[1:]

    def _choices_of(self, prompt: int) -> list[Sequence]:
        return self.sequences[prompt * self._call.best_of : (prompt + 1) * self._call.best_of]

    def _best_of(self, prompt: int) -> list[Sequence]:
        """Return the choices of a prompt that are answered: the best first if `best_of` exceeds
        `n`.
        """
        choices = self._choices_of(prompt)
        if self._call.best_of > self._call.n:
            choices.sort(key=lambda sequence: -sequence.mean_logprob)
        return choices[: self._call.n]

    def _echoed(self, sequence: Sequence) -> list[PositionLogprobs] | None:
        """Return the prompt's log probabilities if a stream shows them before the output's, else
        None.
        """
        call = self._call
        if not (call.echo and call.stream) or call.logprobs is None:
            return None
        return at_most(self._prompt_logprobs.get(sequence.number // call.best_of, []), call.logprobs)


def rejected(claim: Claim, error: ApiError) -> Finished:
    """Return the error result of a request that cannot run or continue."""
    return Finished(claim.key, claim.fence, error.result(new_request_id()), None, claim.request.reply_to)
