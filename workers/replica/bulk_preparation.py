"""What the preparation of claimed requests has in common, many at a time."""

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
    """A request on its way."""

    claim: Claim
    error: Exception | None  # why its texts have no token ids


Pending = TypeVar("Pending", bound=PendingRequest)
Prepared = TypeVar("Prepared")


class BulkPreparation(ABC, Generic[Pending, Prepared]):
    """Parses requests one by one, tokenizes their texts together, and checks them one by one."""

    def __init__(self, models: Sequence[str], traces: RequestTraces | None) -> None:
        self._models = frozenset(models)
        self._traces = traces

    def prepare(self, claims: Sequence[Claim]) -> tuple[list[Prepared], list[Finished]]:
        """What can run, in order, and the error results of what cannot."""
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
        """Return whether its texts get the tokens that the model expects around them."""

    @abstractmethod
    def _encode(self, pending: Sequence[Pending], special_tokens: bool) -> None:
        """Give each text its token ids. Raise EncodingError."""

    @abstractmethod
    def _check(self, item: Pending) -> Prepared:
        """Return what the engine can run. Raise ApiError."""

    @abstractmethod
    def _trace(self, traces: RequestTraces, prepared: Sequence[Prepared]) -> None:
        """Note what requests ask for."""

    def _check_model(self, model: str) -> None:
        if model not in self._models:
            message = f"The model '{fields.shown(model)}' is not served here."
            raise ApiError(404, message, param="model", code="model_not_found")

    def _tokenize(self, pending: Sequence[Pending], special_tokens: bool) -> None:
        """Give each text its token ids, or its request the error of a bad one."""
        try:
            self._encode(pending, special_tokens)
        except EncodingError as error:  # which text it was is not said
            if len(pending) == 1:
                pending[0].error = error
            for item in pending if len(pending) > 1 else ():
                self._tokenize([item], special_tokens)


def error_of(error: Exception, claim: Claim) -> ApiError:
    """Return the caller's error; an unforeseen one ends this request alone."""
    if isinstance(error, ApiError):
        return error
    logger.error("failed to prepare request %s", claim.key, exc_info=error)
    reason = " ".join(str(error).split())[:500] or type(error).__name__
    return ApiError(500, f"The request cannot be prepared: {reason}", "server_error", code="internal_error")
