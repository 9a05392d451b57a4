"""Answer calls to the tokenizer, which need no engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from jobs.protocol import fields
from jobs.protocol.endpoints import TOKENIZER_ENDPOINTS
from jobs.protocol.requests import Claim, Finished, RequestKey
from jobs.protocol.results import ApiError, Result, Usage, encode_json, new_request_id
from jobs.protocol.tokenization import MOST_BYTES, DetokenizeCall, TokenizeCall, TokenizerCall
from jobs.protocol.validation import decode_body
from jobs.queue.request_queue import Held
from workers.replica.bulk_preparation import error_of
from workers.replica.metrics import RequestMetrics
from workers.replica.outbox import Outbox
from workers.replica.rendering import render
from workers.replica.requests_in_flight import rejected
from workers.replica.sampling_params import ModelLimits, check_token
from workers.text.errors import EncodingError
from workers.text.tokenizer import TextTokenizer


class TokenizerAnswers:
    """Create the answers of tokenizer calls."""

    def __init__(self, tokenizer: TextTokenizer, models: Sequence[str], limits: ModelLimits) -> None:
        self._tokenizer = tokenizer
        self._models = frozenset(models)
        self._limits = limits

    def answer(self, claim: Claim) -> Finished:
        """Return the result of a call, also for an error."""
        request = claim.request
        try:
            call = TOKENIZER_ENDPOINTS[request.endpoint].read(decode_body(request.body), request.model)
            body = encode_json(self._body(call))
        except Exception as error:
            return rejected(claim, error_of(error, claim))
        result = Result(200, body, Usage(), new_request_id())
        return Finished(claim.key, claim.fence, result, None, request.reply_to)

    def _body(self, call: TokenizerCall) -> dict[str, object]:
        if call.model not in self._models:
            message = f"The model '{fields.shown(call.model)}' is not served here."
            raise ApiError(404, message, param="model", code="model_not_found")
        if isinstance(call, TokenizeCall):
            return self._tokens_of(call)
        assert isinstance(call, DetokenizeCall)
        return {"prompt": self._text_of(call.tokens)}

    def _tokens_of(self, call: TokenizeCall) -> dict[str, object]:
        param = "messages" if call.messages else "prompt"
        text = render(self._tokenizer, call) if call.messages else call.prompt
        _check_size(text, param)
        try:
            tokens = self._tokenizer.encode([text], call.add_special_tokens)[0]
        except EncodingError as error:
            raise ApiError(400, f"Invalid '{param}': {error}", param=param, code="invalid_value") from None
        return {
            "count": len(tokens),
            "max_model_len": self._limits.max_model_len,
            "tokens": tokens,
            "token_strs": self._tokenizer.names(tokens) if call.return_token_strs else None,
        }

    def _text_of(self, tokens: Sequence[int]) -> str:
        highest = max(tokens, default=0)
        if highest >= self._limits.vocab_size:
            check_token(highest, self._limits.vocab_size, f"tokens[{list(tokens).index(highest)}]")
        text = self._tokenizer.decode(tokens, skip_special_tokens=False)
        _check_size(text, "tokens")
        return text


class Tokenization:
    """Answer calls in a separate thread, so that a long text delays no other request.

    Use from the event loop only.
    """

    def __init__(self, answers: TokenizerAnswers, outbox: Outbox, metrics: RequestMetrics) -> None:
        self._answers = answers
        self._outbox = outbox
        self._metrics = metrics
        self._pending: dict[RequestKey, tuple[int, Future[Finished]]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenization")

    def take(self, claims: Iterable[Claim]) -> list[Claim]:
        """Start the claims that are for the tokenizer; return the others."""
        others: list[Claim] = []
        loop = asyncio.get_running_loop()
        for claim in claims:
            if claim.request.endpoint not in TOKENIZER_ENDPOINTS:
                others.append(claim)
                continue
            answering = self._thread.submit(self._answers.answer, claim)
            self._pending[claim.key] = claim.fence, answering
            asyncio.wrap_future(answering, loop=loop).add_done_callback(self._end)
        return others

    def cancel(self, keys: Iterable[RequestKey]) -> list[Held]:
        """Drop calls whose clients have left; return their leases."""
        held: list[Held] = []
        for key in keys:
            if key in self._pending:
                fence, answering = self._pending.pop(key)
                answering.cancel()
                held.append((key, fence))
        return held

    def close(self) -> None:
        """Stop waiting; another worker answers the remaining calls."""
        self._pending.clear()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _end(self, answering: asyncio.Future[Finished]) -> None:
        if answering.cancelled():
            return
        finished = answering.result()
        fence, _ = self._pending.get(finished.key, (None, None))
        if fence != finished.fence:
            return
        del self._pending[finished.key]
        if not finished.result.succeeded:
            self._metrics.count_error(finished.result)
        self._outbox.finish(finished)


def _check_size(text: str, param: str) -> None:
    """Raise ApiError for a text that is too large for an answer."""
    size = len(text.encode(errors="replace"))
    if size > MOST_BYTES:
        message = f"Invalid '{param}': its text has {size} bytes, but the limit is {MOST_BYTES}: send it in parts."
        raise ApiError(400, message, param=param, code="string_above_max_length")
