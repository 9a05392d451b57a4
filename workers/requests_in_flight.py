"""One request on its way through the engine: what it has so far, what of that is published, and the result that it ends as."""

from __future__ import annotations

import time

from jobs.bodies import new_body_id, response_body
from jobs.requests import Claim, Delta, Finished, TokenChunk
from jobs.results import ApiError, Choice, FinishReason, Result, Usage, encode_json, new_request_id
from workers.engine.messages import EngineRequest
from workers.prepared import Prepared
from workers.text.stop_strings import StopStrings


class RequestInFlight:
    """Output tokens become text only when someone needs the text: at once for stop strings, else when they are published or at the end."""

    __slots__ = (
        "_decoded", "_detokenizer", "_model", "_published_characters", "_published_tokens", "_sampling", "_stop_token_ids", "_stops",
        "_text", "cached_tokens", "claim", "engine_request", "next_publish", "prompt_tokens", "token_ids",
    )  # fmt: skip

    def __init__(self, prepared: Prepared, request_id: int, next_publish: float) -> None:
        """`next_publish` is when its first tokens are due, on the monotonic clock."""
        call, (prompt,) = prepared.call, prepared.prompts
        checkpoint = prepared.claim.checkpoint.choices.get(0) if prepared.claim.checkpoint else None
        self.claim = prepared.claim
        self.prompt_tokens = len(prompt.token_ids)
        self.token_ids: list[int] = [] if checkpoint is None else list(checkpoint.token_ids)
        self.cached_tokens = 0  # of the prompt, from this engine's prefix cache
        self.next_publish = next_publish
        self._model = call.model
        self._sampling = prompt.sampling
        self._stop_token_ids = call.stop_token_ids
        self._stops = StopStrings(call.stop) if call.stop else None
        self._detokenizer = prepared.tokenizer.detokenizer(prompt.token_ids)
        self._decoded = 0
        self._text = ""
        self._published_tokens = len(self.token_ids)
        self._published_characters = 0 if checkpoint is None else checkpoint.text_length
        self._decode(len(self.token_ids))
        self.engine_request = EngineRequest(
            request_id=request_id,
            prompt_token_ids=prompt.token_ids,
            output_token_ids=list(self.token_ids),
            sampling=prompt.sampling,
            live=prepared.claim.live,
        )

    @property
    def fresh_tokens(self) -> int:
        """Tokens that are not published yet."""
        return len(self.token_ids) - self._published_tokens

    @property
    def started(self) -> bool:
        """Whether this worker generated anything for it."""
        return len(self.token_ids) > len(self.engine_request.output_token_ids)

    @property
    def tokens_left(self) -> int:
        """How many more it may get."""
        return self._sampling.max_tokens - len(self.token_ids)

    def take(self, token_ids: list[int], stop_token: int = -1) -> bool:
        """Adds generated tokens, in order; whether a stop string ended the request, after which it keeps no more of them.

        `stop_token`, if any, is the last of the tokens: it counts but gives no text.
        """
        if self._stops is None:
            self.token_ids += token_ids
            return False
        for token_id in token_ids[:-1] if stop_token >= 0 else token_ids:
            self.token_ids.append(token_id)
            self._decode(len(self.token_ids))
            if self._stops.matched is not None:
                return True
        if stop_token >= 0:
            self.token_ids.append(stop_token)
        return False

    def already_over(self) -> Finished | None:
        """The end of a request whose checkpoint leaves nothing to generate."""
        if (self._stops is not None and self._stops.matched is not None) or len(self.token_ids) >= self._sampling.max_tokens:
            return self.finish("length", None)
        return None

    def stop_reason(self, stop_token: int) -> int | None:
        """What the response says about the token that ended it: its id if the request asked for that, nothing for the model's own."""
        return stop_token if stop_token in self._stop_token_ids else None

    def accepted(self) -> Delta:
        """The first message of a live call, before its first tokens."""
        return Delta(self.claim.key, self.claim.fence, self._published_tokens, [], self.claim.request.reply_to, accepted=True)

    def delta(self) -> Delta:
        """What is not published yet, which counts as published from now on."""
        self._decode(len(self.token_ids))
        index, offset = self._published_tokens, self._published_characters
        self._published_tokens = len(self.token_ids)
        self._published_characters = max(offset, len(self._text))
        chunk = TokenChunk(0, index, self.token_ids[index:], self._text[offset:], offset)
        return Delta(self.claim.key, self.claim.fence, self._published_tokens, [chunk], self.claim.request.reply_to)

    def finish(self, reason: FinishReason, stop_reason: int | str | None, stop_token: int = -1) -> Finished:
        """The result; `stop_token` as for `take`. A stop string that was found goes before any other reason."""
        self._decode(len(self.token_ids) - (stop_token >= 0))
        self._text += self._release(self._detokenizer.finish())
        if self._stops is not None:
            self._text += self._stops.finish()
            if self._stops.matched is not None:
                reason, stop_reason = "stop", self._stops.matched
        usage = Usage(self.prompt_tokens, len(self.token_ids), self.cached_tokens)
        endpoint = self.claim.request.endpoint
        created = int(self.claim.request.created or time.time())
        choices = [Choice(0, self._text, reason, stop_reason)]
        body = response_body(endpoint, new_body_id(endpoint), self._model, choices, usage, created)
        return self._end(Result(200, encode_json(body), usage, new_request_id()))

    def fail(self, error: ApiError) -> Finished:
        """The end of a request that the engine gave up."""
        return self._end(error.result(new_request_id()))

    def _end(self, result: Result) -> Finished:
        self._decoded = len(self.token_ids)
        return Finished(self.claim.key, self.claim.fence, result, self.delta(), self.claim.request.reply_to)

    def _decode(self, upto: int) -> None:
        new = self.token_ids[self._decoded : upto]
        if new:
            self._decoded += len(new)
            self._text += self._release(self._detokenizer.feed(new))

    def _release(self, text: str) -> str:
        return text if self._stops is None else self._stops.feed(text)


def rejected(claim: Claim, error: ApiError) -> Finished:
    """The end of a request that cannot run at all."""
    return Finished(claim.key, claim.fence, error.result(new_request_id()), None, claim.request.reply_to)
