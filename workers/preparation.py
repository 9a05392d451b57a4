"""From claimed requests to what the engine takes: parsed, rendered, tokenised many at a time, checked against the model's limits."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from jobs.requests import Claim, Finished
from jobs.results import ApiError
from jobs.validation import CHAT, Call, decode_body, parse_call
from workers.engine.messages import MAX_SEED, SamplingParams
from workers.prepared import Prepared, Prompt
from workers.requests_in_flight import rejected
from workers.text.errors import TemplateError
from workers.text.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine can take, tokens of prompt and output together and token ids, and which of these end a text."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class _Pending:
    claim: Claim
    call: Call
    prompt: str | list[int]

    @property
    def param(self) -> str:
        """What the caller knows the prompt as."""
        return "messages" if self.call.endpoint == CHAT else "prompt"


class Preparation:
    """Prepares requests in bulk; thread-safe."""

    def __init__(self, tokenizer: TextTokenizer, models: Sequence[str], limits: Limits) -> None:
        self._tokenizer = tokenizer
        self._models = frozenset(models)
        self._limits = limits
        own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        self._eos = tuple(dict.fromkeys((*limits.eos_token_ids, *own)))

    def prepare(self, claims: Sequence[Claim]) -> tuple[list[Prepared], list[Finished]]:
        """What can run, in order, and the error results of what cannot."""
        pending: list[_Pending] = []
        errors: list[Finished] = []
        for claim in claims:
            try:
                pending.append(self._parse(claim))
            except Exception as error:
                errors.append(rejected(claim, _answer_for(error, claim)))
        prepared: list[Prepared] = []
        for item, token_ids in zip(pending, self._tokenise(pending), strict=True):
            try:
                prepared.append(self._check(item, token_ids))
            except Exception as error:
                errors.append(rejected(item.claim, _answer_for(error, item.claim)))
        return prepared, errors

    def _parse(self, claim: Claim) -> _Pending:
        call = parse_call(claim.request.endpoint, decode_body(claim.request.body))
        if call.model not in self._models:
            raise ApiError(404, f"The model {call.model!r} is not served here.", "not_found_error", param="model", code="model_not_found")
        if call.sequences > 1 or call.logprobs is not None or call.prompt_logprobs is not None or call.echo or call.max_tokens == 0:
            raise ApiError(400, "Several answers, log probabilities and echo cannot be given yet.", code="unsupported_value")
        if call.endpoint != CHAT:
            return _Pending(claim, call, call.prompts[0])
        try:
            return _Pending(claim, call, self._tokenizer.render(call.messages))
        except TemplateError as error:
            raise ApiError(400, str(error), param="messages") from None

    def _tokenise(self, pending: Sequence[_Pending]) -> list[list[int] | Exception]:
        """Token ids of every prompt, or why its text cannot be encoded."""
        token_ids: list[list[int] | Exception] = [item.prompt if isinstance(item.prompt, list) else [] for item in pending]
        for chat in (True, False):
            rows = [row for row, item in enumerate(pending) if isinstance(item.prompt, str) and (item.param == "messages") == chat]
            encoded = self._encode([str(pending[row].prompt) for row in rows], special_tokens=not chat)
            for row, ids in zip(rows, encoded, strict=True):
                token_ids[row] = ids
        return token_ids

    def _encode(self, texts: list[str], special_tokens: bool) -> list[list[int] | Exception]:
        try:
            return [*self._tokenizer.encode(texts, special_tokens)] if texts else []
        except Exception as error:  # which text it was for is not said, and the library raises plain Exception
            if len(texts) == 1:
                return [error]
            return [ids for text in texts for ids in self._encode([text], special_tokens)]

    def _check(self, item: _Pending, token_ids: list[int] | Exception) -> Prepared:
        call, param = item.call, item.param
        if isinstance(token_ids, TypeError | ValueError):  # half a character (a surrogate), which the tokenizer cannot take
            raise ApiError(400, f"The {param} cannot be encoded as UTF-8.", param=param)
        if isinstance(token_ids, Exception):
            raise token_ids
        if not token_ids:
            token_ids = self._tokenizer.empty_prompt
        if not token_ids:
            raise ApiError(400, f"The {param} has no tokens, and the model has no token to begin with.", param=param)
        if max(token_ids) >= self._limits.vocab_size:
            message = f"The token id {max(token_ids)} is outside of the vocabulary, which has {self._limits.vocab_size}."
            raise ApiError(400, message, param=param)
        max_tokens = self._max_tokens(call, len(token_ids), param)
        seed = item.claim.request.seed if call.seed is None else call.seed
        try:
            sampling = SamplingParams(
                max_tokens=max_tokens,
                temperature=call.temperature,
                top_p=call.top_p,
                top_k=call.top_k,
                seed=seed & MAX_SEED,
                ignore_eos=call.ignore_eos,
                stop_token_ids=(*call.stop_token_ids, *(() if call.ignore_eos else self._eos)),
            )
        except ValueError as error:
            raise ApiError(400, f"{error}.") from None
        return Prepared(item.claim, call, [Prompt(token_ids, sampling)], self._tokenizer)

    def _max_tokens(self, call: Call, prompt: int, param: str) -> int:
        """How many tokens to generate at most. Raises ApiError when prompt and output do not fit together."""
        longest = self._limits.max_model_len
        start = f"This model's maximum context length is {longest} tokens."
        if prompt >= longest:
            raise ApiError(
                400, f"{start} However, your {param} resulted in {prompt} tokens. Please reduce the length of the {param}.",
                param=param, code="context_length_exceeded",
            )  # fmt: skip
        if call.max_tokens is None:
            return longest - prompt
        if prompt + call.max_tokens > longest:
            asked = f"you requested {prompt + call.max_tokens} tokens ({prompt} in the {param}, {call.max_tokens} in the completion)"
            raise ApiError(
                400, f"{start} However, {asked}. Please reduce the length of the {param} or completion.",
                param=param, code="context_length_exceeded",
            )  # fmt: skip
        return call.max_tokens


def _answer_for(error: Exception, claim: Claim) -> ApiError:
    """What the caller hears of an error; one that nobody foresaw ends this request alone."""
    if isinstance(error, ApiError):
        return error
    logger.error("%s cannot be prepared", claim.key, exc_info=error)
    reason = " ".join(str(error).split())[:500] or type(error).__name__
    return ApiError(500, f"The request cannot be prepared: {reason}", "server_error", code="internal_error")
