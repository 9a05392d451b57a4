"""What travels through the queue: the name of a request, the request, and what workers say about
it.
"""

import hashlib
import secrets
from typing import Any

import msgspec

from jobs.protocol.results import PositionLogprobs, Result

LIVE_PREFIX = "live_"


def new_live_id(tenant: str) -> str:
    """An id for a live call.

    It bears a mark of the tenant, so that nothing has to be remembered to keep it from others.
    """
    return f"{LIVE_PREFIX}{mark_of(tenant)}{secrets.token_hex(10)}"


def is_live_id_of(tenant: str, live_id: str) -> bool:
    """Return whether `new_live_id` made it for this tenant."""
    return live_id.startswith(LIVE_PREFIX + mark_of(tenant))


def mark_of(tenant: str) -> str:
    """The mark of a tenant that its live ids bear."""
    return hashlib.sha256(tenant.encode()).hexdigest()[:12]


class RequestKey(msgspec.Struct, frozen=True, order=True, gc=False):
    """Names a request everywhere: a line of a batch, or a live call (its only line is 0)."""

    batch: str
    line: int

    def __str__(self) -> str:
        return f"{self.batch}/{self.line}"

    @property
    def live(self) -> bool:
        """Whether a client waits for it."""
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
    seed: int  # used when the body names none
    custom_id: str | None = None
    created: float = 0.0  # unix seconds
    reply_to: str | None = None  # live: the API process whose stream gets every delta
    trace: str | None = None  # W3C traceparent of the API's span
    trace_state: str | None = None  # its tracestate


class ChoiceCheckpoint(msgspec.Struct):
    """What earlier workers published of one choice."""

    token_ids: list[int]
    text_length: int  # characters
    logprobs: list[PositionLogprobs] = []  # one per token, when asked for
    cached_tokens: int = 0


class RequestCheckpoint(msgspec.Struct):
    """What earlier workers published of a request: the forced prefix for the next one."""

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


class ToolCallDelta(msgspec.Struct, array_like=True):
    """The next piece of a tool call; its first piece has id and name."""

    index: int  # of the call in its answer
    arguments: str = ""
    id: str | None = None
    name: str | None = None


class ParsedDelta(msgspec.Struct, array_like=True):
    """What parsers of reasoning and of tool calls read from the text up to one token, or what they
    still held at the end.

    By `tokens` readers know what they have seen: it never falls from delta to delta of a choice.
    """

    tokens: int  # output tokens of the choice that were read for it; at the end one more than all
    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = []


class TokenChunk(msgspec.Struct, array_like=True, gc=False):
    """The next tokens of one choice, and the text they gave."""

    choice: int  # index in the response
    index: int  # output index of the first token
    token_ids: list[int]
    text: str
    text_offset: int  # characters of the choice's text before `text`
    logprobs: list[PositionLogprobs] | None = None  # one per token, when asked for
    # With a choice's first chunk, when echo asks for them
    prompt_logprobs: list[PositionLogprobs] | None = None
    # With a choice's first chunk: tokens of the prompt in the prefix cache of its first worker
    cached_tokens: int = 0
    # Of a choice whose text is parsed: what its deltas show in place of `text`, token by token
    parsed: list[ParsedDelta] | None = None
    # With a choice's first chunk: how many tokens its prompt has, and when asked for which
    prompt_tokens: int = 0
    prompt_token_ids: list[int] | None = None

    def event(self) -> dict[str, Any]:
        """Return the text that it adds to its choice, and its position there, as readers get it."""
        return {"index": self.choice, "token_offset": self.index, "text": self.text, "text_offset": self.text_offset}


class Delta(msgspec.Struct, gc=False):
    """The next tokens of a request."""

    key: RequestKey
    fence: int
    total: int  # output tokens of all choices, these included
    chunks: list[TokenChunk]
    reply_to: str | None = None
    accepted: bool = False  # the first message of a live call
    system_fingerprint: str = ""  # with it
    continues: bool = False  # the tokens before these were published under the same lease


class Finished(msgspec.Struct):
    """A request's end, with the tokens that were not published yet."""

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
    """One entry of the stream of a batch that is read: what one of its requests was given, or that
    the state of the batch moved.
    """

    id: str  # in that stream; "" of one that sums up the request's own
    key: RequestKey | None  # None: the state moved
    entry_id: str  # of the same entry in the request's own stream
    chunks: list[TokenChunk]
    succeeded: bool | None  # of a request that ended

    def event(self, key: RequestKey, name: str | None) -> dict[str, Any]:
        """Return what a reader of the batch gets; `key` is its request, `name` the custom_id."""
        status = None if self.succeeded is None else "completed" if self.succeeded else "failed"
        return {
            "custom_id": name,
            "line": key.line,
            "choices": [chunk.event() for chunk in self.chunks],
            "status": status,
        }


def pack(value: msgspec.Struct | list[TokenChunk]) -> bytes:
    """Msgpack, the form of every internal message."""
    return msgspec.msgpack.encode(value)


_request_decoder = msgspec.msgpack.Decoder(Request)
_result_decoder = msgspec.msgpack.Decoder(Result)
_chunks_decoder = msgspec.msgpack.Decoder(list[TokenChunk])


def unpack_request(data: bytes) -> Request:
    """The opposite of `pack` for a request."""
    return _request_decoder.decode(data)


def unpack_result(data: bytes) -> Result:
    """The opposite of `pack` for a result."""
    return _result_decoder.decode(data)


def unpack_chunks(data: bytes) -> list[TokenChunk]:
    """The opposite of `pack` for the tokens of a delta."""
    return _chunks_decoder.decode(data)
