"""Track one claimed pooling request in the engine: its inputs and its result."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from jobs.protocol.pooling_endpoint import PoolingCall, PoolingHead
from jobs.protocol.requests import Claim, Finished
from jobs.protocol.results import FinishReason, Result, Usage, encode_json, new_request_id
from workers.engine.messages.core import EngineRequest, LiveShare, PoolingParams, SamplingParams, TokenLogprobs
from workers.replica.in_flight import InFlight
from workers.replica.pooled_vector import PooledVector
from workers.text.inputs import EncodedInput

_NO_TOKENS = SamplingParams(max_tokens=0)


@dataclass(slots=True)
class PreparedPooling:
    """A claimed pooling request that can run: parsed, tokenized and checked against the model's
    limits.

    `width` is the numbers per row if there is one row per token, else 0. With `compared` the inputs
    are the queries and then the documents of a call, whose embeddings are compared.
    """

    claim: Claim
    call: PoolingCall
    inputs: list[EncodedInput]
    pooling: PoolingParams
    labels: Sequence[str] = ()
    width: int = 0
    compared: bool = False
    system_fingerprint: str = ""
    output_format: None = None
    digest: bytes = b""  # from `duplicates.digest_of`


class PoolingSequence:
    """One pooled input; it gets no tokens."""

    __slots__ = ("_encoded", "cached_tokens", "device_seconds", "ended", "last_token", "output", "token_ids")

    resumed = False
    new_tokens = 0
    finish_reason: FinishReason = "stop"

    def __init__(self, encoded: EncodedInput) -> None:
        self._encoded = encoded
        self.cached_tokens = 0
        self.device_seconds = 0.0
        self.ended = False
        self.last_token = 0.0
        self.output: PooledVector | None = None
        self.token_ids: list[int] = []

    @property
    def prompt_length(self) -> int:
        return len(self._encoded.token_ids)

    @property
    def length(self) -> int:
        return self.prompt_length

    def take(self, token_ids: list[int], stop_token: int = -1, logprobs: list[TokenLogprobs] | None = None) -> bool:
        return False

    def end(self, reason: FinishReason, stop_token: int = -1) -> None:
        """End the input. Raise ValueError if the engine gave no numbers."""
        if self.output is None:
            raise ValueError("the engine gave no numbers for an input")
        self.ended = True

    def engine_request(
        self, request_id: int, item: PreparedPooling, arrived: float, share: LiveShare | None
    ) -> EngineRequest:
        """Return the engine request of this input."""
        live, key, encoded = item.claim.live, item.claim.key, self._encoded
        return EngineRequest(
            request_id,
            encoded.token_ids,
            [],
            _NO_TOKENS,
            live,
            item.call.priority,
            "" if live else key.batch,
            arrived=arrived,
            pooling=msgspec.structs.replace(item.pooling, unpooled=encoded.unpooled),
            second_text=encoded.second_text,
            share=share,
        )


class PoolingInFlight(InFlight[PoolingSequence]):
    """Run all inputs of a request under one lease.

    There is no checkpoint: after a worker's death the next one starts again.
    """

    __slots__ = ("_at_once", "_item", "_tokens")

    publishes = False

    def __init__(self, item: PreparedPooling, ids: Iterator[int], now: float) -> None:
        """Take an engine id for each input. Times are those of `RequestInFlight`."""
        super().__init__(item.claim, now, item.system_fingerprint)
        self.announced = True
        self.next_publish = now
        self.sequences = [PoolingSequence(encoded) for encoded in item.inputs]
        self.running = {next(ids): sequence for sequence in self.sequences}
        self._item = item
        self._tokens = sum(sequence.prompt_length for sequence in self.sequences)
        self._at_once = [
            sequence.engine_request(request_id, item, self.arrived, self.share)
            for request_id, sequence in self.running.items()
        ]

    @property
    def started(self) -> bool:
        return len(self.running) < len(self.sequences)

    @property
    def pooled_tokens(self) -> int:
        return self._tokens * len(self.running) // len(self.sequences)

    @property
    def tokens_left(self) -> int:
        return len(self.running)

    def all_have(self, tokens: int) -> bool:
        return not self.running

    def begin(self, grammar: str = "") -> list[EngineRequest]:
        added, self._at_once = self._at_once, []
        return added

    def take_pooled(self, request_id: int, numbers: bytes) -> None:
        """Encode the numbers of one input.

        Encoding input by input keeps the event loop free; encoding all at the end would delay other
        requests. Raises ValueError for a number that is not finite, and ApiError for one too large
        for `embed_dtype`.
        """
        sequence, item = self.running[request_id], self._item
        sequence.output = PooledVector(numbers, item.width, item.call.embed_dtype)
        if item.call.endpoint.shows_vectors:
            sequence.output.encoded(item.call.encoding_format)

    def finish(self) -> Finished:
        item, request = self._item, self.claim.request
        call, endpoint = item.call, item.call.endpoint
        usage = Usage(
            self._tokens,
            cached_tokens=sum(sequence.cached_tokens for sequence in self.sequences),
            device_microseconds=self.device_microseconds(),
        )
        created = int(request.created or time.time())
        head = PoolingHead(endpoint.new_id(), call.model, created, usage.prompt_tokens, item.labels)
        result = Result(200, encode_json(endpoint.body(call, head, self._outputs())), usage, new_request_id())
        return Finished(self.claim.key, self.claim.fence, result, None, request.reply_to)

    def _outputs(self) -> list[PooledVector]:
        outputs = [sequence.output for sequence in self.sequences if sequence.output is not None]
        if not self._item.compared:
            return outputs
        queries, documents = outputs[: len(self._item.call.queries)], outputs[len(self._item.call.queries) :]
        queries *= len(documents) if len(queries) == 1 else 1
        return [query.cosine(document) for query, document in zip(queries, documents, strict=True)]
