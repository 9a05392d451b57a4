"""Prepare claimed requests for the engine: parse, render, tokenize in bulk, check against the
model's limits.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from jobs.protocol.default_parameters import DefaultParameters
from jobs.protocol.endpoints import check_answers
from jobs.protocol.requests import BY_WORKER, SOFT_MAX_TOKENS, Claim
from jobs.protocol.results import ApiError
from jobs.protocol.validation import Call, decode_body, parse_call
from workers.replica.answer_parsers import AnswerParsers
from workers.replica.bulk_preparation import BulkPreparation
from workers.replica.checked_answers import is_json
from workers.replica.long_texts import LongTexts
from workers.replica.prepared import PreparedRequest, Prompt
from workers.replica.rendering import render
from workers.replica.sampling_params import (
    ModelLimits,
    SamplingMaker,
    check_logprobs,
    check_token,
)
from workers.replica.tool_choice import format_of
from workers.replica.tracing import RequestTraces
from workers.text.errors import FormatError
from workers.text.tokenizer import TextTokenizer

# Tokens read beyond those kept of a truncated prompt: a cut changes the tokens next to it
_SPARE_TOKENS = 64


@dataclass(slots=True)
class _Pending:
    """A request under preparation: its prompts as received, then as token ids."""

    claim: Claim
    call: Call
    sampling: SamplingMaker
    given: Sequence[str | list[int]]
    in_reasoning: bool | None = False  # whether an answer begins inside; None if it may
    token_ids: list[list[int]] = field(default_factory=list)
    error: Exception | None = None

    def param(self, number: int) -> str:
        """Return the caller's name for one of the prompts."""
        name = self.call.endpoint.prompt_field
        return name if len(self.given) == 1 else f"{name}[{number}]"


class Preparation(BulkPreparation[_Pending, PreparedRequest]):
    """Prepares requests in bulk; thread-safe."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        models: Sequence[str],
        limits: ModelLimits,
        parsers: AnswerParsers | None = None,
        retries: int = 0,
        traces: RequestTraces | None = None,
        system_fingerprint: str | None = None,
        defaults: DefaultParameters | None = None,
    ) -> None:
        """Create the preparation.

        `retries` is how often a batch line is retried if its answer is not the JSON it asks for.
        `system_fingerprint` is part of every answer. `defaults` are the model's, for live calls and
        for lines that were read before they were known.
        """
        super().__init__(models, traces)
        self._system_fingerprint = system_fingerprint
        self._defaults = defaults
        self._tokenizer = tokenizer
        self._long_texts = LongTexts(tokenizer, limits.max_model_len)
        self._parsers = parsers or AnswerParsers()
        self._retries = retries
        own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        self._limits = dataclasses.replace(limits, eos_token_ids=tuple(dict.fromkeys((*limits.eos_token_ids, *own))))

    def _parse(self, claim: Claim) -> _Pending:
        request = claim.request
        defaults = self._defaults if claim.live or request.defaults == BY_WORKER else None
        call = parse_call(request.endpoint, decode_body(request.body), defaults)
        if request.defaults == SOFT_MAX_TOKENS:
            call = msgspec.structs.replace(call, soft_max_tokens=True)
        self._check_model(call.model)
        check_answers(call.model, self._limits.tasks, call.endpoint.url)
        self._parsers.check(call)
        given: Sequence[str | list[int]] = [render(self._tokenizer, call)] if call.messages else call.prompts
        item = _Pending(claim, call, SamplingMaker(call, request.seed, self._tokenizer, self._limits), given)
        item.in_reasoning = self._parsers.in_reasoning(call, str(given[0]))
        item.given = [self._cut(prompt, item, number) for number, prompt in enumerate(given)]
        return item

    def _cut(self, prompt: str | list[int], item: _Pending, number: int) -> str | list[int]:
        """Return a prompt cut to the part that can matter, so that tokenization stays short."""
        kept = self._kept(item.call)
        if isinstance(prompt, list):
            return prompt if kept is None else prompt[-kept:]
        if kept is not None:
            longest = self._tokenizer.longest_token
            return prompt if longest is None else prompt[-(kept + _SPARE_TOKENS) * longest :]
        self._long_texts.refuse(prompt, item.param(number))
        return prompt

    def _kept(self, call: Call) -> int | None:
        """Return how many of a prompt's last tokens the call keeps at most, or None."""
        if call.truncate_prompt_tokens == -1:
            return max(1, self._limits.max_model_len - max(1, call.own_max_tokens or 0))
        return call.truncate_prompt_tokens

    def _adds_special_tokens(self, item: _Pending) -> bool:
        return item.call.adds_special_tokens

    def _encode(self, pending: Sequence[_Pending], special_tokens: bool) -> None:
        texts = [prompt for item in pending for prompt in item.given if isinstance(prompt, str)]
        encoded = iter(self._tokenizer.encode(texts, special_tokens) if texts else ())
        for item in pending:
            item.token_ids = [next(encoded) if isinstance(prompt, str) else prompt for prompt in item.given]

    def _trace(self, traces: RequestTraces, prepared: Sequence[PreparedRequest]) -> None:
        traces.prepared(prepared)

    def _check(self, item: _Pending) -> PreparedRequest:
        if item.error is not None:
            param = item.call.endpoint.prompt_field
            raise ApiError(400, f"Invalid '{param}': {item.error}", param=param, code="invalid_value")
        prompts = [self._prompt(item, number, token_ids) for number, token_ids in enumerate(item.token_ids)]
        check_logprobs(item.call, prompts)
        return self._with_form(PreparedRequest(item.claim, item.call, prompts, self._tokenizer), item.in_reasoning)

    def _with_form(self, prepared: PreparedRequest, in_reasoning: bool | None) -> PreparedRequest:
        """Set the output format of the answers, and their parsing."""
        call, parsers = prepared.call, self._parsers
        prepared.system_fingerprint = self._system_fingerprint
        prepared.output_format = format_of(call, parsers.call_syntax)
        prepared.guide = parsers.guide(call, in_reasoning, prepared.output_format)
        if prepared.guide is not None and prepared.output_format is None:
            self._check_vocabulary()
        prepared.parsing = parsers.parsing(call, in_reasoning)
        if is_json(call.output_format) and call.temperature > 0 and not prepared.claim.live:
            prepared.retries = self._retries
        return prepared

    def _check_vocabulary(self) -> None:
        """Raise ApiError if the texts of the tokens cannot be determined.

        A call with an output format gets this error when its grammar is compiled.
        """
        if self._vocabulary_error is not None:
            param = "thinking_token_budget"
            raise ApiError(400, f"Invalid '{param}': {self._vocabulary_error}", param=param, code="invalid_value")

    @functools.cached_property
    def _vocabulary_error(self) -> str | None:
        """Return the reason if the tokens have no texts of their own, else None.

        The check also computes the texts for the engine.
        """
        try:
            self._tokenizer.vocabulary()
        except FormatError as error:
            return str(error)
        return None

    def _prompt(self, item: _Pending, number: int, token_ids: list[int]) -> Prompt:
        call, param = item.call, item.param(number)
        kept = self._kept(call)
        if kept is not None and len(token_ids) > kept:
            token_ids = self._last(
                token_ids, kept, framed=call.adds_special_tokens and isinstance(item.given[number], str)
            )
        token_ids = token_ids or self._tokenizer.empty_prompt
        if not token_ids:
            message = f"Invalid '{param}': it has no tokens, and the model has no token that begins a text."
            raise ApiError(400, message, param=param, code="invalid_value")
        if max(token_ids) >= self._limits.vocab_size:
            place = next(i for i, token in enumerate(token_ids) if token >= self._limits.vocab_size)
            check_token(token_ids[place], self._limits.vocab_size, f"{param}[{place}]")
        return Prompt(
            token_ids,
            item.sampling.make(len(token_ids), param),
            self._echo(call, number, token_ids) if call.echo else "",
        )

    def _last(self, token_ids: list[int], kept: int, framed: bool) -> list[int]:
        """Return the last `kept` tokens.

        With `framed`, the leading special tokens of the tokenizer stay in front and count.
        """
        front = self._tokenizer.encode([""], special_tokens=True)[0] if framed else []
        if front and len(front) < kept and token_ids[: len(front)] == front:
            return front + token_ids[len(front) - kept :]
        return token_ids[-kept:]

    def _echo(self, call: Call, number: int, token_ids: list[int]) -> str:
        """Return the prompt's text as it was given.

        A prompt that was cut or given as token ids is decoded, including its special tokens; half a
        character at its end is decoded with the answer.
        """
        given = call.prompts[number]
        if isinstance(given, str) and call.truncate_prompt_tokens is None:
            return given
        return self._tokenizer.prompt_text(
            token_ids, skip_special_tokens=call.skip_special_tokens and isinstance(given, str)
        )
