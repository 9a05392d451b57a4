"""Results of requests, and their tokens while they are generated."""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import msgspec

from batch_inference_pipeline.errors import ClientError


class RequestResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one request: a line of a batch's results."""

    custom_id: str
    response: dict[str, Any] | None = None
    error: dict[str, Any] | None = None

    @property
    def body(self) -> dict[str, Any]:
        """The answer's body. Raises `RequestFailed` without an answer."""
        if self.error is not None or self.response is None:
            raise RequestFailed(self)
        return cast(dict[str, Any], self.response["body"])

    @property
    def text(self) -> str:
        """The text of the first choice; empty where the answer calls a tool.

        Raises `RequestFailed`.
        """
        choice = self.body["choices"][0]
        return str((choice["message"]["content"] if "message" in choice else choice["text"]) or "")

    @property
    def embedding(self) -> Any:
        """The vector of the first text. Raises `RequestFailed`."""
        return self.body["data"][0]["embedding"]

    @property
    def value(self) -> Any:
        """The text, vector, score, label or other main value. Raises `RequestFailed`."""
        if "choices" in self.body:
            return self.text
        first = (self.body.get("data") or self.body.get("results") or [self.body])[0]
        return next((first[name] for name in ("embedding", "score", "label", "data") if name in first), first)

    @property
    def problem(self) -> tuple[str, str]:
        """The code and the message of the error."""
        error = self.error or {}
        return str(error.get("code") or "error"), str(error.get("message") or "the server gave no reason")


class RequestFailed(ClientError):
    """One request has no answer; `result` has its line."""

    def __init__(self, result: RequestResult) -> None:
        code, message = result.problem
        super().__init__(f"the request {result.custom_id} has no answer ({code}): {message}")
        self.result = result

    def __reduce__(self) -> tuple[type["RequestFailed"], tuple[RequestResult]]:
        return type(self), (self.result,)


class TokenDelta(NamedTuple):
    """New text of one choice of a request. `status` is None until the request has ended."""

    custom_id: str | None
    line: int  # of the input, from 1
    choice: int
    text: str
    status: str | None


def decode_results(lines: bytes) -> list[RequestResult]:
    """Return the results of whole lines."""
    return [_decode(line) for line in lines.splitlines() if line]


_decode = msgspec.json.Decoder(RequestResult).decode


class InputOrder:
    """Reorders results from the order of completion to the order of the input."""

    def __init__(self, custom_ids: Iterable[str]) -> None:
        self._expected = deque(custom_ids)
        self._early: dict[str, RequestResult] = {}

    def add(self, results: Sequence[RequestResult]) -> list[RequestResult]:
        """Add results, and return the ones that are next in the order."""
        self._early |= {result.custom_id: result for result in results}
        ready = []
        while self._expected and self._expected[0] in self._early:
            ready.append(self._early.pop(self._expected.popleft()))
        return ready


class TokenDeltas:
    """Converts the events of a batch's stream to deltas.

    Text that arrives twice, such as after a reconnect, is returned once.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int], int] = {}

    def add(self, event: dict[str, Any]) -> list[TokenDelta]:
        """Return the deltas of an event."""
        line, custom_id = event["line"], event["custom_id"]
        deltas = [
            TokenDelta(custom_id, line, choice["index"], text, None)
            for choice in event["choices"]
            if (text := self._new_text(line, choice))
        ]
        if event["status"] is not None:
            deltas.append(TokenDelta(custom_id, line, 0, "", event["status"]))
            for key in [key for key in self._seen if key[0] == line]:
                del self._seen[key]
        return deltas

    def _new_text(self, line: int, choice: dict[str, Any]) -> str:
        key, offset, text = (line, choice["index"]), choice["text_offset"], str(choice["text"])
        seen = self._seen.get(key, 0)
        self._seen[key] = max(seen, offset + len(text))
        return text[max(0, seen - offset) :]
