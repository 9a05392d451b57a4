"""Prepare claimed requests in bulk: the steps shared by generation and pooling."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from jobs.protocol import fields
from jobs.protocol.requests import Claim, Finished
from jobs.protocol.results import ApiError
from workers.replica.requests_in_flight import rejected
from workers.replica.tracing import RequestTraces
from workers.text.errors import EncodingError

logger = logging.getLogger(__name__)


class PendingRequest(Protocol):
    """A request under preparation."""

    claim: Claim
    error: Exception | None  # why tokenization failed


Pending = TypeVar("Pending", bound=PendingRequest)
Prepared = TypeVar("Prepared")


class BulkPreparation(ABC, Generic[Pending, Prepared]):
    """Parse requests one by one, tokenize their texts together, and check them one by one."""

    def __init__(self, models: Sequence[str], traces: RequestTraces | None) -> None:
        self._models = frozenset(models)
        self._traces = traces

    def prepare(self, claims: Sequence[Claim]) -> tuple[list[Prepared], list[Finished]]:
        """Return the requests that can run, in claim order, and error results for the others."""
        if self._traces is not None:
            self._traces.claimed(claims)
        pending: list[Pending] = []
        errors: list[Finished] = []
        for claim in claims:
            try:
                pending.append(self._parse(claim))
            except Exception as error:
                errors.append(rejected(claim, error_of(error, claim)))
        for special_tokens in (True, False):
            same = [item for item in pending if self._adds_special_tokens(item) == special_tokens]
            self._tokenize(same, special_tokens)
        prepared: list[Prepared] = []
        for item in pending:
            try:
                prepared.append(self._check(item))
            except Exception as error:
                errors.append(rejected(item.claim, error_of(error, item.claim)))
        if self._traces is not None:
            self._trace(self._traces, prepared)
        return prepared, errors

    @abstractmethod
    def _parse(self, claim: Claim) -> Pending:
        """Read a request. Raise ApiError."""

    @abstractmethod
    def _adds_special_tokens(self, item: Pending) -> bool:
        """Return whether the tokenizer adds the model's special tokens to this request's texts."""

    @abstractmethod
    def _encode(self, pending: Sequence[Pending], special_tokens: bool) -> None:
        """Set the token ids of each text. Raise EncodingError."""

    @abstractmethod
    def _check(self, item: Pending) -> Prepared:
        """Return the prepared request. Raise ApiError."""

    @abstractmethod
    def _trace(self, traces: RequestTraces, prepared: Sequence[Prepared]) -> None:
        """Record the parameters of the requests in their spans."""

    def _check_model(self, model: str) -> None:
        if model not in self._models:
            message = f"The model '{fields.shown(model)}' is not served here."
            raise ApiError(404, message, param="model", code="model_not_found")

    def _tokenize(self, pending: Sequence[Pending], special_tokens: bool) -> None:
        """Set the token ids of each text; a request with a bad text gets the error."""
        try:
            self._encode(pending, special_tokens)
        except EncodingError as error:  # the error does not name the text
            if len(pending) == 1:
                pending[0].error = error
            for item in pending if len(pending) > 1 else ():
                self._tokenize([item], special_tokens)


def error_of(error: Exception, claim: Claim) -> ApiError:
    """Return the API error for a failed preparation. An unforeseen error ends only this request."""
    if isinstance(error, ApiError):
        return error
    logger.error("failed to prepare request %s", claim.key, exc_info=error)
    reason = " ".join(str(error).split())[:500] or type(error).__name__
    return ApiError(500, f"The request cannot be prepared: {reason}", "server_error", code="internal_error")
