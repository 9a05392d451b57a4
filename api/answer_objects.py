"""Objects of the API's answers, which its OpenAPI document describes.

They are OpenAI's, in the order of its JSON; `tests/api/test_answer_objects.py` lists where they
differ from the types of its package. A member that may be `UNSET` is left out when it is.
"""

from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from jobs.protocol.logprobs import ChatPosition, PromptToken
from jobs.protocol.results import FinishReason
from jobs.protocol.states import State
from jobs.protocol.unknown_members import UnknownMember
from jobs.store.file_store import PURPOSES, RESULT_PURPOSE
from jobs.store.upload_store import UploadStatus

Item = TypeVar("Item")

_Purpose = Annotated[str, msgspec.Meta(extra_json_schema={"enum": [*PURPOSES, RESULT_PURPOSE]})]
_ServiceTier = Literal["default", "flex", "priority"]  # what the call's tier came to
_PromptLogprobs = list[dict[int, PromptToken] | None]


class AnswerObject(msgspec.Struct):
    """An answer of a route, or a part of one."""

    def as_dict(self) -> dict[str, Any]:
        """Return the object as JSON has it."""
        made: dict[str, Any] = msgspec.to_builtins(self)
        return made


class PageOf(AnswerObject, Generic[Item]):
    """A page of a listing."""

    object: Literal["list"]
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileObject(AnswerObject):
    """A file that was uploaded, or that a batch writes."""

    id: str
    bytes: int
    created_at: int
    filename: str
    object: Literal["file"]
    purpose: _Purpose
    status: Literal["processed"]
    expires_at: int | None
    status_details: None


class FileDeleted(AnswerObject):
    """The answer to the deletion of a file."""

    id: str
    deleted: bool
    object: Literal["file"]


class UploadObject(AnswerObject):
    """An upload in parts, with its file once it is completed."""

    id: str
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    object: Literal["upload"]
    purpose: _Purpose
    status: UploadStatus
    file: FileObject | None


class UploadPart(AnswerObject):
    """A part of an upload."""

    id: str
    created_at: int
    object: Literal["upload.part"]
    upload_id: str


class BatchError(AnswerObject):
    """An error of a line, or of a file of lines."""

    code: str
    line: int | None
    message: str
    param: str | None


class Errors(AnswerObject):
    """The errors for which a batch failed."""

    data: list[BatchError]
    object: Literal["list"]


class BatchRequestCounts(AnswerObject):
    """The number of a batch's lines, and of those with an answer or an error."""

    completed: int
    failed: int
    total: int


class InputTokensDetails(AnswerObject):
    """The tokens of prompts that the prefix cache had."""

    cached_tokens: int


class OutputTokensDetails(AnswerObject):
    """The tokens of answers that are reasoning."""

    reasoning_tokens: int


class BatchUsage(AnswerObject):
    """The tokens of a batch, and the time that devices took for it."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int
    device_seconds: float


class Batch(AnswerObject):
    """A batch."""

    id: str
    completion_window: str
    created_at: int
    endpoint: str
    input_file_id: str
    object: Literal["batch"]
    status: State
    cancelled_at: int | None
    cancelling_at: int | None
    completed_at: int | None
    error_file_id: str | None
    errors: Errors | None
    expired_at: int | None
    expires_at: int | None
    failed_at: int | None
    finalizing_at: int | None
    in_progress_at: int | None
    metadata: dict[str, str] | None
    model: str | None
    output_file_id: str | None
    request_counts: BatchRequestCounts
    usage: BatchUsage
    priority: int | UnsetType = UNSET  # left out where it is 0
    risk: Literal["urgent", "late"] | UnsetType = UNSET
    unknown_members: list[UnknownMember] | UnsetType = UNSET  # of the lines' bodies, where there are some
    # This and the next two: of a batch whose requests are appended
    input: Literal["stream"] | UnsetType = UNSET
    open: bool | UnsetType = UNSET
    last_append_at: int | UnsetType | None = UNSET


class BatchDeleted(AnswerObject):
    """The answer to the deletion of a batch, in the shape of OpenAI's other deletions."""

    id: str
    object: Literal["batch"]
    deleted: bool


class BatchRequests(AnswerObject):
    """The outcome of the lines of one call; `errors` are of lines that the batch did not take."""

    object: Literal["batch.requests"]
    batch_id: str
    appended: int
    repeated: int
    errors: list[BatchError]
    total: int


class PromptTokensDetails(AnswerObject):
    """The tokens of a prompt that the prefix cache had."""

    cached_tokens: int


class CompletionTokensDetails(AnswerObject):
    """The tokens of an answer that are reasoning."""

    reasoning_tokens: int


class CompletionUsage(AnswerObject):
    """The tokens of a call; reasoning is counted where the worker has a parser for it."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class FunctionCall(AnswerObject):
    """The function that an answer calls; its arguments are JSON as the model wrote it."""

    name: str
    arguments: str


class ChatCompletionToolCall(AnswerObject):
    """A call of a tool that an answer asks for."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatCompletionMessage(AnswerObject):
    """The message of an answer, with its reasoning and calls of tools."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ChatCompletionToolCall] | UnsetType = UNSET


class ChatCompletionLogprobs(AnswerObject):
    """Log probabilities of an answer's tokens."""

    content: list[ChatPosition]
    refusal: None


class ChatCompletionChoice(AnswerObject):
    """One of the answers to a conversation."""

    index: int
    message: ChatCompletionMessage
    logprobs: ChatCompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(AnswerObject):
    """The answer to a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatCompletionChoice]
    system_fingerprint: str | None
    usage: CompletionUsage
    service_tier: _ServiceTier | UnsetType = UNSET
    prompt_logprobs: _PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionLogprobs(AnswerObject):
    """Log probabilities of a text's tokens; null for the first token of a prompt."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(AnswerObject):
    """One of the texts generated after a prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None
    prompt_logprobs: _PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET


class Completion(AnswerObject):
    """The texts generated after prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str | None
    usage: CompletionUsage
    service_tier: _ServiceTier | UnsetType = UNSET


ANSWERS: tuple[Any, ...] = (
    PageOf[FileObject],
    FileDeleted,
    UploadObject,
    UploadPart,
    PageOf[Batch],
    BatchDeleted,
    BatchRequests,
    ChatCompletion,
    Completion,
)
"""The objects of the OpenAPI document; their parts need not be named."""
