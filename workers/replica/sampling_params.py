"""Convert a call's parameters to the engine's, checked against the vocabulary and the room that its
prompt leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from jobs.protocol.parameters import TOKEN_ID_LISTS, Parameters
from jobs.protocol.results import ApiError
from jobs.protocol.validation import Call
from workers.engine.messages.core import MAX_SEED, SamplingParams
from workers.replica.prepared import Prompt
from workers.text.errors import EncodingError
from workers.text.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The limits of the model: tokens of prompt and output together, token ids, the token ids that
    end a text, and the supported tasks.
    """

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    tasks: tuple[str, ...] = ("generate", "tokenize")


MOST_LOGPROBS = 2**19
"""Most log probabilities that one request may ask for, at about 25 bytes each in its checkpoint;
its worker and its answer hold all at once.
"""

_NOMINAL_TOKENS = 4096
"""Tokens counted for a choice that may use the rest of the context: few use it, and a long context
alone should refuse no request.
"""


MOST_BAD_WORD_TOKENS = 8192
"""Most tokens in all encodings of a request's bad words; each is compared at each step."""


_MADE = {"max_tokens", "seed", "stop_token_ids", "logit_bias", "bad_words", "logprobs", "prompt_logprobs"}
_COPIED = tuple(
    name for name in SamplingParams.__struct_fields__ if name in Parameters.__struct_fields__ and name not in _MADE
)
"""Fields copied to the engine unchanged; the others need the model or its tokenizer."""


class SamplingMaker:
    """Create the sampling parameters of one call's prompts."""

    def __init__(self, call: Call, seed: int, tokenizer: TextTokenizer, limits: ModelLimits) -> None:
        """Validate the call; `seed` applies if the call has none.

        Raises ApiError for a parameter that the model does not support.
        """
        self._call = call
        self._seed = (seed if call.seed is None else call.seed) & MAX_SEED
        self._longest = limits.max_model_len
        self._stops = (*call.stop_token_ids, *(() if call.ignore_eos else limits.eos_token_ids))
        self._eos_token_ids = limits.eos_token_ids
        self._bad_words = _bad_words(call.bad_words, tokenizer, limits.vocab_size)
        _check_vocabulary(call, limits.vocab_size)
        self._check_allowed()

    def make(self, prompt_tokens: int, param: str) -> SamplingParams:
        """Return the parameters for a prompt of this many tokens, at least one.

        `param` is the caller's name for the prompt. Raises ApiError if prompt and output exceed the
        context.
        """
        call = self._call
        echoed = -1 if call.logprobs is None or not call.echo else call.logprobs
        max_tokens = self._max_tokens(prompt_tokens, param)
        if call.min_tokens > max_tokens:
            room = (
                f"which the prompt leaves room for {max_tokens} of"
                if call.max_tokens is None
                else f"which is {max_tokens}"
            )
            raise ApiError(
                400, f"Invalid 'min_tokens': it must be at most 'max_tokens', {room}, but is {call.min_tokens}.",
                param="min_tokens", code="invalid_value",
            )  # fmt: skip
        return SamplingParams(
            **{name: getattr(call, name) for name in _COPIED},
            max_tokens=max_tokens,
            seed=self._seed,
            stop_token_ids=self._stops,
            logit_bias=tuple(call.logit_bias.items()),
            bad_words=self._bad_words,
            logprobs=call.logprobs if call.logprobs is not None else 0 if call.best_of > call.n else -1,
            prompt_logprobs=max(echoed, -1 if call.prompt_logprobs is None else call.prompt_logprobs),
        )

    def _check_allowed(self) -> None:
        """Raise ApiError if the parameters together may allow no token at all."""
        call, allowed = self._call, set(self._call.allowed_token_ids)
        if not allowed or call.max_tokens == 0:
            return
        ruled_out = {run[-1] for run in self._bad_words if allowed.issuperset(run[:-1])}
        if call.min_tokens:
            ruled_out.update(call.stop_token_ids, self._eos_token_ids)
        if allowed <= ruled_out:
            message = "Invalid 'allowed_token_ids': 'bad_words' and 'min_tokens' rule out each of them."
            raise ApiError(400, message, param="allowed_token_ids", code="invalid_value")

    def _max_tokens(self, prompt_tokens: int, param: str) -> int:
        """Return the most tokens to generate."""
        call, longest, name = self._call, self._longest, self._call.endpoint.prompt_field
        if prompt_tokens >= longest:
            too_long(f"your {name} resulted in {prompt_tokens} tokens", param, longest, name)
        if call.max_tokens is None:
            return longest - prompt_tokens
        if call.soft_max_tokens:
            return min(call.max_tokens, longest - prompt_tokens)
        if prompt_tokens + call.max_tokens > longest:
            total = prompt_tokens + call.max_tokens
            asked = f"you requested {total} tokens ({prompt_tokens} in the {name}, {call.max_tokens} in the completion)"
            too_long(asked, param, longest, f"{name} or completion")
        return call.max_tokens


def too_long(asked: str, param: str, longest: int, reducible: str) -> NoReturn:
    """Raise the error of a call that does not fit the model's context, in OpenAI's words."""
    start = f"This model's maximum context length is {longest} tokens. However, {asked}."
    message = f"{start} Please reduce the length of the {reducible}."
    raise ApiError(400, message, param=param, code="context_length_exceeded")


def check_logprobs(call: Call, prompts: Sequence[Prompt]) -> None:
    """Raise ApiError for a call that asks for more log probabilities than a worker may hold."""
    count = 0
    for prompt in prompts:
        sampling = prompt.sampling
        tokens = call.own_max_tokens
        if tokens is None:
            tokens = min(sampling.max_tokens, _NOMINAL_TOKENS)
        count += call.best_of * tokens * (sampling.logprobs + 1)
        count += len(prompt.token_ids) * (sampling.prompt_logprobs + 1)
    if count > MOST_LOGPROBS:
        param = (
            "logprobs"
            if call.logprobs is not None
            else "prompt_logprobs"
            if call.prompt_logprobs is not None
            else "best_of"
        )
        message = f"You requested up to {count} log probabilities, of which at most {MOST_LOGPROBS} can be given."
        raise ApiError(
            400, f"{message} Please reduce 'max_tokens', 'n' or '{param}'.", param=param, code="invalid_value"
        )


def _check_vocabulary(call: Call, vocab_size: int) -> None:
    for token in call.logit_bias:
        if token >= vocab_size:
            raise ApiError(
                400,
                f"Invalid key in 'logit_bias': {token}. Maximum value is {vocab_size - 1}.",
                param="logit_bias",
                code="invalid_value",
            )
    for name in TOKEN_ID_LISTS:
        for i, token in enumerate(getattr(call, name)):
            check_token(token, vocab_size, f"{name}[{i}]")


def check_token(token: int, vocab_size: int, param: str) -> None:
    """Raise ApiError for a token id that the model does not have."""
    if token >= vocab_size:
        raise ApiError(
            400,
            f"Invalid '{param}': integer above maximum value. Expected a token id <= {vocab_size - 1}, but got {token}"
            " instead.",
            param=param,
            code="integer_above_max_value",
        )


def _bad_words(words: list[str], tokenizer: TextTokenizer, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences that write each word."""
    runs: dict[tuple[int, ...], None] = {}
    for i, word in enumerate(words):
        param = f"bad_words[{i}]"
        try:
            written = tokenizer.encode_word(word)
        except EncodingError as error:
            raise ApiError(400, f"Invalid '{param}': {error}", param=param, code="invalid_value") from None
        if not written or any(token >= vocab_size for run in written for token in run):
            raise ApiError(
                400, f"Invalid '{param}': the model has no tokens for it.", param=param, code="invalid_value"
            )
        runs.update(dict.fromkeys(map(tuple, written)))
    count = sum(map(len, runs))
    if count > MOST_BAD_WORD_TOKENS:
        message = (
            f"Invalid 'bad_words': the words are {count} tokens, with and without a space, and may be at most"
            f" {MOST_BAD_WORD_TOKENS}."
        )
        raise ApiError(400, message, param="bad_words", code="invalid_value")
    return tuple(runs)
