"""A request that cannot be answered, the error that it must get, and the small bodies that such
ones are made of; the demo model is asked.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MODEL = "demo"
CONTEXT = 2048
VOCABULARY = 1024
END = 2  # the token that ends a text

ANSWERED = "answered"
"""A line that names no model is given one by run-batch."""

INF, NAN = float("inf"), float("nan")


class BadRequest(NamedTuple):
    """One of them.

    `in_file` is the code for which a whole file is refused; None: its line gets the error;
    ANSWERED: it gets none.
    """

    name: str
    endpoint: str
    body: bytes
    param: str | None
    code: str | None
    words: str  # a piece of the message
    in_file: str | None = None
    status: int = 400
    needs_model: bool = False  # whether it takes a tokenizer to find out

    @property
    def line(self) -> bytes:
        """It as a line of a file."""
        return b'{"custom_id": %b, "method": "POST", "url": "%b", "body": %b}' % (
            json.dumps(self.name).encode(),
            self.endpoint.encode(),
            self.body,
        )


def chat(**changes: Any) -> dict[str, Any]:
    """The body of a chat that is answered with one token, and what is changed of it."""
    return {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "x"}], **changes}


def completion(**changes: Any) -> dict[str, Any]:
    """The same for a completion."""
    return {"model": MODEL, "max_tokens": 1, "prompt": "x", **changes}


def message(**fields: Any) -> dict[str, Any]:
    """A chat whose only message is changed."""
    return chat(messages=[{"role": "user", "content": "x", **fields}])


def without(body: dict[str, Any], *names: str) -> dict[str, Any]:
    """A body that lacks some fields."""
    return {key: value for key, value in body.items() if key not in names}


def as_json(body: Any) -> bytes:
    """A body as a careless client writes it: with NaN, infinity and halves of characters."""
    return json.dumps(body).encode()


def bad(
    endpoint: str, body: Any, name: str, param: str | None, code: str | None, words: str, **more: Any
) -> BadRequest:
    """A bad request of a body, JSON or bytes."""
    return BadRequest(name, endpoint, body if isinstance(body, bytes) else as_json(body), param, code, words, **more)


def nested(depth: int) -> Any:
    """A string in so many arrays."""
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value
