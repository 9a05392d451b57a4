"""Prepare claimed pooling requests for the engine: parse, tokenize in bulk, check against the
model's limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from jobs.protocol import fields
from jobs.protocol.endpoints import POOLING_ENDPOINTS, check_answers
from jobs.protocol.pooling_endpoint import PoolingCall
from jobs.protocol.requests import Claim, Finished
from jobs.protocol.results import ApiError
from jobs.protocol.validation import decode_body
from workers.engine.messages.core import PoolingParams, Ready
from workers.replica.bulk_preparation import BulkPreparation
from workers.replica.long_texts import LongTexts
from workers.replica.pooling_in_flight import PreparedPooling
from workers.replica.preparation import Preparation
from workers.replica.prepared import Prepared
from workers.replica.sampling_params import check_token, too_long
from workers.replica.tracing import RequestTraces
from workers.text.inputs import EncodedInput, Input
from workers.text.sentence_files import SentenceFiles
from workers.text.tokenizer import TextTokenizer

_MOST_NUMBERS = 1 << 23  # most numbers in one answer, about 100 MB as JSON


@dataclass(slots=True)
class _Part:
    """One input as received, and the name of its parameter."""

    given: Input | list[int]
    param: str
    encoded: EncodedInput | None = None
    unpooled: int = 0  # prompt tokens that are not pooled


@dataclass(slots=True)
class _PendingPooling:
    """A pooling request under preparation."""

    claim: Claim
    call: PoolingCall
    parts: list[_Part]
    compared: bool
    error: Exception | None = None
    texts: list[_Part] = field(init=False)  # the parts to tokenize

    def __post_init__(self) -> None:
        self.texts = [part for part in self.parts if not isinstance(part.given, list)]


class PoolingPreparation(BulkPreparation[_PendingPooling, PreparedPooling]):
    """Prepare pooling requests in bulk; thread-safe."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        models: Sequence[str],
        info: Ready,
        files: SentenceFiles,
        traces: RequestTraces | None = None,
        system_fingerprint: str = "",
    ) -> None:
        """Create the preparation. `info` comes from the engine core, `files` from the model's
        folder.
        """
        super().__init__(models, traces)
        self._tokenizer = tokenizer
        self._info = info
        self._files = files
        self._system_fingerprint = system_fingerprint
        self._longest = min(info.max_model_len, files.max_seq_length or info.max_model_len)
        self._long_texts = LongTexts(tokenizer, self._longest)
        self._unpooled_of: dict[tuple[str, bool], int] = {}  # by prompt text, and whether special tokens are added

    def _parse(self, claim: Claim) -> _PendingPooling:
        call = POOLING_ENDPOINTS[claim.request.endpoint].read(decode_body(claim.request.body))
        self._check_model(call.model)
        check_answers(call.model, (*self._info.tasks, "tokenize"), call.endpoint.url)
        compared = bool(call.documents) and "score" not in self._info.tasks
        parts = self._texts_of(call) if call.inputs else _compared(call) if compared else _pairs(call)
        for part in parts:
            part.given = self._shorten(part, call)
        return _PendingPooling(claim, call, parts, compared)

    def _texts_of(self, call: PoolingCall) -> list[_Part]:
        """Return the inputs: texts with the prompt prepended, token ids unchanged."""
        prompt = self._files.prompt(call.prompt_name)
        if prompt is None:
            known = ", ".join(f"'{name}'" for name in self._files.prompts) or "none"
            message = f"Invalid 'prompt_name': the model has no prompt '{fields.shown(call.prompt_name or '')}'."
            raise ApiError(400, f"{message} It has: {known}.", param="prompt_name", code="invalid_value")
        parts = _parts(call.inputs, call.endpoint.prompt_field)
        unpooled = self._unpooled(prompt, call.add_special_tokens) if prompt else 0
        for part in parts if prompt else ():
            if isinstance(part.given, str):
                part.given, part.unpooled = prompt + part.given, unpooled
        return parts

    def _unpooled(self, prompt: str, special_tokens: bool) -> int:
        """Return how many tokens at the start of prompted texts are not pooled.

        As in sentence-transformers, these are the tokens of the prompt alone, without a special
        token at its end.
        """
        if self._files.include_prompt:
            return 0
        known = self._unpooled_of.get((prompt, special_tokens))
        if known is None:
            known = self._unpooled_of[prompt, special_tokens] = self._count_unpooled(prompt, special_tokens)
        return known

    def _count_unpooled(self, prompt: str, special_tokens: bool) -> int:
        (token_ids,) = self._tokenizer.encode([prompt.lower() if self._files.do_lower_case else prompt], special_tokens)
        ends = token_ids and self._tokenizer.are_special(self._tokenizer.names(token_ids[-1:]))
        return len(token_ids) - bool(ends)

    def _shorten(self, part: _Part, call: PoolingCall) -> Input | list[int]:
        """Return an input cut to the part that can matter, so that tokenization stays short."""
        given = part.given
        if isinstance(given, list):
            return given
        if isinstance(given, tuple):
            return self._shorten_text(given[0], part.param, call), self._shorten_text(given[1], part.param, call)
        return self._shorten_text(given, part.param, call)

    def _shorten_text(self, text: str, param: str, call: PoolingCall) -> str:
        text = text.lower() if self._files.do_lower_case else text
        kept = self._kept(call)
        if kept is None:
            self._long_texts.refuse(text, param)
            return text
        return self._long_texts.shorten(text, kept, self._tokenizer.inputs.from_left(call.truncation_side))

    def _kept(self, call: PoolingCall) -> int | None:
        """Return the most tokens of an input that the call keeps, or None."""
        return self._longest if call.truncate_prompt_tokens == -1 else call.truncate_prompt_tokens

    def _adds_special_tokens(self, item: _PendingPooling) -> bool:
        return item.call.add_special_tokens

    def _encode(self, pending: Sequence[_PendingPooling], special_tokens: bool) -> None:
        parts = [part for item in pending for part in item.texts]
        encoded = self._tokenizer.inputs.encode([_text(part) for part in parts], special_tokens) if parts else []
        for part, found in zip(parts, encoded, strict=True):
            part.encoded = found

    def _trace(self, traces: RequestTraces, prepared: Sequence[PreparedPooling]) -> None:
        traces.prepared_pooling(prepared)

    def _check(self, item: _PendingPooling) -> PreparedPooling:
        if item.error is not None:
            param = item.texts[0].param if len(item.texts) == 1 else item.call.endpoint.prompt_field
            raise ApiError(400, f"Invalid '{param}': {item.error}", param=param, code="invalid_value")
        inputs = [self._encoded(part, item.call) for part in item.parts]
        pooling = self._params(item.call, item.compared)
        width = (pooling.dimensions or self._info.embedding_size) if pooling.task == "token_embed" else 0
        if not item.compared:
            self._check_size(item.call, pooling, inputs)
        labels, fingerprint = self._info.labels, self._system_fingerprint
        return PreparedPooling(
            item.claim, item.call, inputs, pooling, labels, width, item.compared, system_fingerprint=fingerprint
        )

    def _encoded(self, part: _Part, call: PoolingCall) -> EncodedInput:
        kept, side, given = self._kept(call), call.truncation_side, part.given
        encoded = EncodedInput(given) if isinstance(given, list) else part.encoded
        assert encoded is not None
        if kept is not None and len(encoded.token_ids) > kept:
            if isinstance(given, list):
                encoded = EncodedInput(self._tokenizer.inputs.cut_ids(given, kept, side))
            else:
                encoded = self._tokenizer.inputs.cut(given, call.add_special_tokens, kept, side)
        token_ids, param = encoded.token_ids, part.param
        if not token_ids:
            raise ApiError(400, f"Invalid '{param}': the text has no tokens.", param=param, code="invalid_value")
        if len(token_ids) > self._longest:
            too_long(f"your {param} resulted in {len(token_ids)} tokens", param, self._longest, param)
        if max(token_ids) >= self._info.vocab_size:
            place = next(i for i, token in enumerate(token_ids) if token >= self._info.vocab_size)
            check_token(token_ids[place], self._info.vocab_size, f"{param}[{place}]")
        return encoded._replace(unpooled=part.unpooled)

    def _params(self, call: PoolingCall, compared: bool) -> PoolingParams:
        task = call.endpoint.engine_task(call, self._info.tasks)
        if task not in self._info.tasks:
            known = ", ".join(f"'{one}'" for one in self._info.tasks if one != "score")
            message = f"Invalid 'task': the model `{call.model}` cannot do '{task}'. It does: {known}."
            raise ApiError(400, message, param="task", code="unsupported_value")
        if task == "classify":
            if call.dimensions is not None:
                message = "'dimensions' must be left out: it is for embeddings."
                raise ApiError(400, message, param="dimensions", code="unsupported_value")
            return PoolingParams(task, activation=call.use_activation is not False)
        if call.dimensions is not None:
            self._check_dimensions(call.model, call.dimensions)
        return PoolingParams(task, call.dimensions or 0, True if compared else call.use_activation)

    def _check_dimensions(self, model: str, dimensions: int) -> None:
        """Raise ApiError for dimensions that the model was not trained for."""
        size, allowed = self._info.embedding_size, self._info.matryoshka
        if dimensions == size or dimensions in allowed or (not allowed and dimensions < size):
            return
        known = ", ".join(map(str, sorted({*allowed, size}))) if allowed else f"1 to {size}"
        message = f"Invalid 'dimensions': the embeddings of the model `{model}` can have {known}, but not {dimensions}."
        raise ApiError(400, message, param="dimensions", code="invalid_value")

    def _check_size(self, call: PoolingCall, pooling: PoolingParams, inputs: Sequence[EncodedInput]) -> None:
        """Raise ApiError if the answer would be too large."""
        if pooling.task == "classify":
            return
        rows = sum(len(one.token_ids) for one in inputs) if pooling.task == "token_embed" else len(inputs)
        count, param = rows * (pooling.dimensions or self._info.embedding_size), call.endpoint.prompt_field
        if count > _MOST_NUMBERS:
            message = f"Invalid '{param}': the answer would have {count} numbers, of at most {_MOST_NUMBERS}."
            raise ApiError(400, f"{message} Send fewer texts.", param=param, code="invalid_value")


def prepare_each(
    texts: Preparation, numbers: PoolingPreparation, claims: Sequence[Claim]
) -> tuple[list[Prepared], list[Finished]]:
    """Prepare each request according to its endpoint."""
    pooled = [claim for claim in claims if claim.request.endpoint in POOLING_ENDPOINTS]
    others = [claim for claim in claims if claim.request.endpoint not in POOLING_ENDPOINTS]
    prepared: list[Prepared] = []
    errors: list[Finished] = []
    for preparation, taken in ((texts, others), (numbers, pooled)):
        found, refused = preparation.prepare(taken) if taken else ([], [])
        prepared += found
        errors += refused
    return prepared, errors


def _parts(texts: Sequence[str | list[int]], param: str) -> list[_Part]:
    return [_Part(text, param if len(texts) == 1 else f"{param}[{i}]") for i, text in enumerate(texts)]


def _compared(call: PoolingCall) -> list[_Part]:
    """Return the queries, then the documents, each as an input."""
    queries, documents = (
        _parts(texts, name) for name, texts in zip(call.fields, (call.queries, call.documents), strict=True)
    )
    return [*queries, *documents]


def _pairs(call: PoolingCall) -> list[_Part]:
    """Return pairs of query and document as inputs; an error names the document."""
    documents = _parts(call.documents, call.fields[1])
    return [_Part(pair, document.param) for pair, document in zip(call.pairs, documents, strict=True)]


def _text(part: _Part) -> Input:
    assert not isinstance(part.given, list)
    return part.given
