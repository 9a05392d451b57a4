"""Shares that a request holds until it ends: memory for its body, and a call of its key."""

from collections.abc import Callable

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from api.http.answer_headers import note_headers
from api.shares import ClientShares
from jobs.protocol.results import ApiError

_AT_END = "at_end"
_RETRY_SECONDS = "1"


class BodyMemory:
    """The memory that the body of one request takes, until the request ends at the latest."""

    def __init__(self, request: Request, shares: ClientShares, owner: str) -> None:
        self.bytes = 0
        self._request = request
        self._shares = shares
        self._owner = owner
        at_end(request, self.give_back)

    def fits(self, amount: int) -> bool:
        """Take some bytes more, and return True, if there is room for them."""
        taken = self._shares.take(self._owner, amount)
        self.bytes += amount if taken else 0
        return taken

    def take(self, amount: int) -> None:
        """Take some bytes more. Raise `ApiError` 429 or 503."""
        if self.fits(amount):
            return
        note_headers(self._request, {"retry-after": _RETRY_SECONDS})
        if self._shares.exceeds_own(self._owner, amount):
            message = "The bodies of your requests at once are as large as they may be together; try again."
            raise ApiError(429, message, "rate_limit_error", code="rate_limit_exceeded")
        message = "The bodies of all requests at once are as large as they may be together; try again."
        raise ApiError(503, message, "server_error", code="server_full")

    def give_back(self) -> None:
        """Release all bytes."""
        amount, self.bytes = self.bytes, 0
        self._shares.give_back(self._owner, amount)


def take_call(request: Request, shares: ClientShares, owner: str) -> None:
    """Hold a call of a key until it ends. Raise `ApiError` 429."""
    if not shares.take(owner):
        note_headers(request, {"retry-after": _RETRY_SECONDS})
        message = "Your key has as many calls at once as it may have; try again."
        raise ApiError(429, message, "rate_limit_error", code="rate_limit_exceeded")
    at_end(request, lambda: shares.give_back(owner))


def at_end(request: Request, action: Callable[[], None]) -> None:
    """Run `action` when the request has ended, whatever its end is."""
    request.scope["state"][_AT_END].append(action)


class ReturnShares:
    """Give back what a request holds when it ends, as plain ASGI middleware."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        actions = scope.setdefault("state", {})[_AT_END] = list[Callable[[], None]]()
        try:
            await self._app(scope, receive, send)
        finally:
            for action in actions:
                action()
