"""The messages of the queue: request keys, requests, and workers' reports about them."""

import hashlib
import secrets
from typing import Any, Final, Literal

import msgspec

from jobs.protocol.results import PositionLogprobs, Result

LIVE_PREFIX = "live_"
_MARK_LENGTH = 12

DefaultsMark = Literal["", "max_tokens", "worker"]
"""How a line gets its model's defaults.

- "": its body has them, or there are none
- "max_tokens": its body has them, and `max_tokens` is one, which shrinks to the room that the
  prompt leaves
- "worker": the worker adds its own, since they were not known when the line was read
"""
SOFT_MAX_TOKENS: Final = "max_tokens"
BY_WORKER: Final = "worker"


def new_live_id(tenant: str) -> str:
    """Return an id for a live call.

    It contains a mark of the tenant, so that access needs no stored state.
    """
    return f"{LIVE_PREFIX}{mark_of(tenant)}{secrets.token_hex(10)}"


def is_live_id_of(tenant: str, live_id: str) -> bool:
    """Return whether `new_live_id` created the id for this tenant."""
    return live_id.startswith(LIVE_PREFIX + mark_of(tenant))


def mark_of(tenant: str) -> str:
    """Return the mark of a tenant in its live ids."""
    return hashlib.sha256(tenant.encode()).hexdigest()[:_MARK_LENGTH]


class RequestKey(msgspec.Struct, frozen=True, order=True, gc=False):
    """Names a request everywhere: a line of a batch, or a live call (its only line is 0)."""

    batch: str
    line: int

    def __str__(self) -> str:
        return f"{self.batch}/{self.line}"

    @property
    def tenant_mark(self) -> str:
        """Return the mark of a live call's tenant."""
        return self.batch[len(LIVE_PREFIX) :][:_MARK_LENGTH]

    @property
    def live(self) -> bool:
        """Return whether it is a live call."""
        return self.batch.startswith(LIVE_PREFIX)

    @classmethod
    def parse(cls, text: str | bytes) -> "RequestKey":
        """Read the form that `str` gives. Raise ValueError for anything else."""
        batch, slash, line = (text.decode() if isinstance(text, bytes) else text).rpartition("/")
        if not slash or not batch:
            raise ValueError(f"not a request key: {text!r}")
        return cls(batch, int(line))


class Request(msgspec.Struct):
    """A line of a batch or a live call, as Redis stores it."""

    endpoint: str  # its url
    model: str
    body: bytes  # JSON as submitted
    seed: int  # used if the body sets none
    custom_id: str | None = None
    created: float = 0.0  # unix seconds
    reply_to: str | None = None  # live: the API process whose stream gets every delta
    trace: str | None = None  # W3C traceparent of the API's span
    trace_state: str | None = None  # its tracestate
    defaults: DefaultsMark = ""  # of a line; a live call gets its worker's


class ChoiceCheckpoint(msgspec.Struct):
    """The tokens that earlier workers published of one choice."""

    token_ids: list[int]
    text_length: int  # characters
    logprobs: list[PositionLogprobs] = []  # one per token, if requested
    cached_tokens: int = 0


class RequestCheckpoint(msgspec.Struct):
    """The tokens that earlier workers published of a request: the forced prefix for the next
    worker.
    """

    choices: dict[int, ChoiceCheckpoint]


class Claim(msgspec.Struct):
    """A request that a worker holds a lease on, until it commits, requeues or loses it."""

    key: RequestKey
    fence: int
    request: Request
    checkpoint: RequestCheckpoint | None
    attempt: int  # 1 for the first worker
    live: bool
    watched: bool = False
    engine_crashes: int = 0  # engine cores that died with this request in flight
    weight: float = 1.0  # of a live call's tenant


class ToolCallDelta(msgspec.Struct, array_like=True):
    """The next piece of a tool call; its first piece has id and name."""

    index: int  # of the call in its answer
    arguments: str = ""
    id: str | None = None
    name: str | None = None


class ParsedDelta(msgspec.Struct, array_like=True):
    """The parts of reasoning and tool calls parsed from the text up to one token, or at its end.

    A reader knows by `tokens` which deltas it has seen: it never decreases within a choice.
    """

    tokens: int  # output tokens of the choice parsed so far; at the end one more than all
    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = []


class TokenChunk(msgspec.Struct, array_like=True, gc=False):
    """The next tokens of one choice, and their text."""

    choice: int  # index in the response
    index: int  # output index of the first token
    token_ids: list[int]
    text: str
    text_offset: int  # characters of the choice's text before `text`
    logprobs: list[PositionLogprobs] | None = None  # one per token, if requested
    # With a choice's first chunk, if requested by echo.
    prompt_logprobs: list[PositionLogprobs] | None = None
    # With a choice's first chunk: prompt tokens in the prefix cache of its first worker.
    cached_tokens: int = 0
    # The deltas that replace `text` if it is parsed, token by token.
    parsed: list[ParsedDelta] | None = None
    # With a choice's first chunk: the number of prompt tokens, and, if requested, their ids.
    prompt_tokens: int = 0
    prompt_token_ids: list[int] | None = None

    def event(self) -> dict[str, Any]:
        """Return the text that the chunk adds to its choice, and its position, for readers."""
        return {"index": self.choice, "token_offset": self.index, "text": self.text, "text_offset": self.text_offset}


class Delta(msgspec.Struct, gc=False):
    """The next tokens of a request."""

    key: RequestKey
    fence: int
    total: int  # output tokens of all choices, including these
    chunks: list[TokenChunk]
    reply_to: str | None = None
    accepted: bool = False  # True in the first message of a live call
    system_fingerprint: str = ""  # sent with `accepted`
    continues: bool = False  # the earlier tokens were published under the same lease


class Finished(msgspec.Struct):
    """The end of a request, with the tokens that were not published yet."""

    key: RequestKey
    fence: int
    result: Result
    delta: Delta | None = None
    reply_to: str | None = None


class StreamEntry(msgspec.Struct, gc=False):
    """One entry of a token stream or of an API process' stream."""

    key: RequestKey
    entry_id: str
    chunks: list[TokenChunk]
    accepted: bool = False
    result: Result | None = None  # the request's end
    system_fingerprint: str | None = None  # of the worker that accepted it


class BatchEntry(msgspec.Struct, frozen=True):
    """One entry of a watched batch's stream: tokens of one of its requests, or a change of its
    state.
    """

    id: str  # id in that stream; "" for an entry that sums up the request's own
    key: RequestKey | None  # None: the state changed
    entry_id: str  # of the same entry in the request's own stream
    chunks: list[TokenChunk]
    succeeded: bool | None  # None until the request ended

    def event(self, key: RequestKey, name: str | None) -> dict[str, Any]:
        """Return the event for a reader of the batch; `key` is its request, `name` the
        custom_id.
        """
        status = None if self.succeeded is None else "completed" if self.succeeded else "failed"
        return {
            "custom_id": name,
            "line": key.line,
            "choices": [chunk.event() for chunk in self.chunks],
            "status": status,
        }


def pack(value: msgspec.Struct | list[TokenChunk]) -> bytes:
    """Encode as msgpack, the format of every internal message."""
    return msgspec.msgpack.encode(value)


_request_decoder = msgspec.msgpack.Decoder(Request)
_result_decoder = msgspec.msgpack.Decoder(Result)
_chunks_decoder = msgspec.msgpack.Decoder(list[TokenChunk])


def unpack_request(data: bytes) -> Request:
    """Decode a request that `pack` encoded."""
    return _request_decoder.decode(data)


def unpack_result(data: bytes) -> Result:
    """Decode a result that `pack` encoded."""
    return _result_decoder.decode(data)


def unpack_chunks(data: bytes) -> list[TokenChunk]:
    """Decode the tokens of a delta that `pack` encoded."""
    return _chunks_decoder.decode(data)
