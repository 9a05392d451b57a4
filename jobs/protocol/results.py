"""The outcome of a request: choices, usage, the result or the error, and lines of result files."""

import json
import uuid
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from jobs.errors import JobsError

FinishReason = Literal["stop", "length", "tool_calls"]
ErrorType = Literal["invalid_request_error", "not_found_error", "server_error", "rate_limit_error"]


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one request, and its device time."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens from the prefix cache
    reasoning_tokens: int | None = None  # of the completion; None without a parser for them
    device_microseconds: int = 0  # of the worker that answered

    def as_openai(self) -> dict[str, Any]:
        """Return the `usage` object of a response."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.reasoning_tokens is not None:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return usage

    def plus(self, other: "Usage") -> "Usage":
        """Return the sum of both."""
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
            (self.reasoning_tokens or 0) + (other.reasoning_tokens or 0),
            self.device_microseconds + other.device_microseconds,
        )


class TokenLogprob(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One token's log probability in the model's own distribution, before temperature and the
    like.
    """

    token_id: int
    token: bytes  # its text; may be part of a character
    logprob: float | None  # natural logarithm; None for the first token of a prompt
    rank: int  # 1 for the most likely


class PositionLogprobs(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The token at one position, and as many of the most likely tokens as requested, best first."""

    chosen: TokenLogprob
    top: list[TokenLogprob]


class ToolCall(msgspec.Struct, frozen=True):
    """A tool call in an answer."""

    id: str
    name: str
    arguments: str  # JSON, as the model wrote it


class ParsedMessage(msgspec.Struct, frozen=True):
    """The reasoning, content and tool calls parsed from an answer's text."""

    content: str | None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = []


class Choice(msgspec.Struct, frozen=True):
    """One complete answer of a response."""

    index: int
    text: str  # with echo, the prompt's text first
    finish_reason: FinishReason
    stop_reason: int | str | None = None  # the stop string or token id that ended it
    logprobs: list[PositionLogprobs] | None = None  # of `text`'s tokens, if requested
    prompt_logprobs: list[PositionLogprobs] | None = None  # vLLM's field, if requested
    message: ParsedMessage | None = None  # of a chat whose text is parsed
    token_ids: list[int] | None = None  # of the answer, if requested
    prompt_token_ids: list[int] | None = None  # if requested
    tokens_as_ids: bool = False  # log probabilities name tokens by their ids


class Result(msgspec.Struct, frozen=True):
    """The complete response to one request.

    `body` is JSON: a completion, or an error object if `status` is 400 or more.
    """

    status: int
    body: bytes
    usage: Usage
    request_id: str

    @property
    def succeeded(self) -> bool:
        """Return whether the line counts as completed."""
        return self.status < 400


class ApiError(JobsError):
    """An error in OpenAI's shape; clients may branch on every field but the message.

    Clients do not repeat a call with a `final` one, whatever its status.
    """

    def __init__(
        self,
        status: int,
        message: str,
        type: ErrorType = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        *,
        final: bool = False,
    ) -> None:
        super().__init__(message)
        self.final = final
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """Return `{"error": {...}}` with all four keys."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def result(self, request_id: str) -> Result:
        """Return the same error as the result of a request."""
        return Result(self.status, encode_json(self.body()), Usage(), request_id)


def encode_json(value: Any) -> bytes:
    """Encode as JSON in UTF-8.

    Lone surrogates are replaced, since strict readers refuse them even when escaped.
    """
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        text = json.dumps(msgspec.to_builtins(value), separators=(",", ":"), ensure_ascii=False)
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def new_request_id() -> str:
    """Return an id for the `x-request-id` header and for result lines."""
    return f"req_{uuid.uuid4().hex}"


def batch_request_id(batch: str, line: int) -> str:
    """Return the `id` of a result line: the same however often the line is written."""
    return f"batch_req_{batch.removeprefix('batch_')}_{line}"


def line_of(batch_request_id: str) -> int:
    """Return the line number in the `id` of a result line."""
    return int(batch_request_id.rpartition("_")[2])


def output_line(custom_id: str | None, result: Result, batch_request_id: str) -> bytes:
    """Return one line of a result file, without the line feed.

    A failed line has its error in both places that clients read.
    """
    error = b"null" if result.succeeded else _line_error(result.body)
    return _unbroken(
        b'{"id":%b,"custom_id":%b,"response":{"status_code":%d,"request_id":%b,"body":%b},"error":%b}'
        % (
            encode_json(batch_request_id),
            encode_json(custom_id),
            result.status,
            encode_json(result.request_id),
            result.body,
            error,
        )
    )


def unanswered_line(custom_id: str, code: str, message: str, batch_request_id: str) -> bytes:
    """Return one line of an error file for a request that never ran.

    `code` is, for example, `batch_cancelled` or `batch_expired`.
    """
    line = {
        "id": batch_request_id,
        "custom_id": custom_id,
        "response": None,
        "error": {"code": code, "message": message},
    }
    return _unbroken(encode_json(line))


def with_columns(line: bytes, columns: Mapping[str, Any]) -> bytes:
    """Add the columns of an input's row to a line of a result file."""
    return line[:-1] + b',"columns":' + _unbroken(encode_json(columns)) + b"}" if columns else line


def _unbroken(line: bytes) -> bytes:
    """Escape characters that JSON allows and Python's `splitlines` takes for a line's end.

    Many clients read result files with `splitlines`.
    """
    if line.isascii():
        return line
    return (
        line.replace(b"\xc2\x85", b"\\u0085").replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
    )


def _line_error(body: bytes) -> bytes:
    error = msgspec.json.decode(body).get("error") or {}
    return encode_json(
        {
            "code": error.get("code") or error.get("type") or "server_error",
            "message": error.get("message") or "no message",
        }
    )
