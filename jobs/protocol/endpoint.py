"""The base classes of endpoints: how a prompt is read, and the shapes of answers.

`chat.py` and `completions.py` generate text, `pooling_endpoint.py` has those that return numbers,
`endpoints.py` lists all.
"""

from __future__ import annotations

import itertools
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from jobs.protocol import fields
from jobs.protocol.logprobs import TextOffsets
from jobs.protocol.parameters import FILE_COLUMNS, IGNORED, parameter_names
from jobs.protocol.results import Choice, FinishReason, PositionLogprobs, Usage
from jobs.protocol.value_types import Schema

if TYPE_CHECKING:
    from jobs.protocol.requests import TokenChunk

Task = Literal["generate", "tokenize", "embed", "classify", "score"]
"""The task of a model for its endpoints; score: one number for a pair of texts."""


class AnswerHead(NamedTuple):
    """The members shared by all chunks of a stream and by the body of an answer."""

    id: str
    model: str
    created: int  # unix seconds
    system_fingerprint: str | None = None  # of the worker
    service_tier: str | None = None  # the tier that was applied, if the call names one


class ChoiceEnd(NamedTuple):
    """Why a choice ended."""

    finish_reason: FinishReason
    stop_reason: int | str | None = None


class Endpoint(ABC):
    """An endpoint; it holds no state."""

    url: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()  # other urls of its calls
    tasks: ClassVar[tuple[Task, ...]]  # a model with any of them answers it

    @property
    @abstractmethod
    def body_schema(self) -> Schema:
        """Return the JSON Schema of bodies; for a `TextEndpoint` only the required members."""


class BatchEndpoint(Endpoint):
    """An endpoint whose calls may also be lines of batches."""

    prompt_field: ClassVar[str]  # the parameter with the input
    number_column: ClassVar[Literal["", "embedding", "score"]] = ""
    """The column of a Parquet result file that holds the answer to one input."""

    @property
    def text_names(self) -> tuple[tuple[str, ...], ...]:
        """Return the parameters that hold a call's texts; each item is an alternative set of
        names.
        """
        return ((self.prompt_field,),)

    @cached_property
    def members(self) -> frozenset[str]:
        """Return the members that a body may have; others are ignored."""
        return frozenset({"model", *IGNORED, *itertools.chain(*self.text_names), *self.parameter_names})

    @property
    @abstractmethod
    def parameter_names(self) -> frozenset[str]:
        """Return the parameters of a call, except `model` and the texts."""

    @property
    def takes_one_text(self) -> bool:
        """Return whether a call needs only one text, besides the model."""
        return self.text_names == ((self.prompt_field,),)

    def body_of_text(self, text: str) -> dict[str, Any]:
        """Return the members of a body for a call about one text."""
        return {self.prompt_field: text}

    @property
    @abstractmethod
    def file_columns(self) -> tuple[str, ...]:
        """Return the other parameters that a row of a Parquet file can have, except `model`."""

    @property
    def name(self) -> str:
        """Return OpenAI's name of the endpoint, such as "Chat Completions"."""
        return self.url.removeprefix("/v1/").replace("/", " ").title()

    @abstractmethod
    def check_body(self, body: dict[str, Any], prefix: str) -> None:
        """Raise `ApiError` for a line's body whose input is missing or has another JSON type."""

    @abstractmethod
    def expected_length(self, body: dict[str, Any]) -> int:
        """Return the sort key of a file's lines, longest first.

        It is the number of answer tokens as far as the body limits them, or, without generation,
        the size of the texts. The body may contain anything that `check_body` accepts.
        """

    @abstractmethod
    def prefix_texts(self, body: dict[str, Any]) -> Iterable[str]:
        """Return the pieces of the prompt whose prefix should be computed once for all lines with
        it.

        Empty if the order by length matters more.
        """


class TextEndpoint(BatchEndpoint):
    """An endpoint that generates text."""

    tasks = ("generate",)
    is_chat: ClassVar[bool]  # selects the type of a parameter
    usual_tokens: ClassVar[int]  # expected tokens of an answer that the body does not limit
    prompt_schema: ClassVar[Schema]
    id_prefix: ClassVar[str]
    body_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def new_id(self) -> str:
        """Return an `id` for a response body; all chunks of a stream have the same one."""
        return self.id_prefix + uuid.uuid4().hex

    @property
    def body_schema(self) -> Schema:
        return {"required": ["model", self.prompt_field]}

    @property
    def parameter_names(self) -> frozenset[str]:
        return parameter_names(self.is_chat)

    @property
    def file_columns(self) -> tuple[str, ...]:
        return FILE_COLUMNS

    def expected_length(self, body: dict[str, Any]) -> int:
        for name in ("max_completion_tokens", "max_tokens"):
            value = body.get(name)
            if isinstance(value, int | float) and 0 <= value <= fields.INT32:
                return int(value)
        return self.usual_tokens

    def prompt_of(self, body: dict[str, Any], prefix: str = "") -> Any:
        """Return the prompt of a body. Raise `ApiError` if a required one is missing."""
        return fields.required(body, self.prompt_field, prefix)

    def check_body(self, body: dict[str, Any], prefix: str) -> None:
        self.check_prompt(self.prompt_of(body, prefix), f"{prefix}{self.prompt_field}")
        if body.get("stream") is not None:
            fields.boolean(body["stream"], f"{prefix}stream")

    @abstractmethod
    def check_prompt(self, value: Any, param: str) -> None:
        """Raise `ApiError` for a prompt of another JSON type."""

    @abstractmethod
    def read_prompt(self, value: Any, answers: int) -> dict[str, Any]:
        """Return the fields of a `Call` that the prompt sets, with `answers` answers to each
        prompt.

        Raise `ApiError`.
        """

    @abstractmethod
    def choice(self, choice: Choice) -> dict[str, Any]:
        """Return one of a body's choices, without the reasons of its end."""

    @abstractmethod
    def delta(
        self,
        text: str | None,
        positions: Sequence[PositionLogprobs],
        offsets: TextOffsets | None = None,
        as_ids: bool = False,
    ) -> dict[str, Any]:
        """Return the fields of a chunk's choice for new text, which is None at its end.

        `offsets` finds where the tokens begin; with `as_ids` log probabilities name tokens by their
        ids.
        """

    def deltas(
        self, chunk: TokenChunk, positions: Sequence[PositionLogprobs], offsets: TextOffsets, as_ids: bool
    ) -> list[dict[str, Any]]:
        """Return the fields of the choices of one or more chunks for new tokens.

        Tokens without visible text add none.
        """
        return [self.delta(chunk.text, positions, offsets, as_ids)] if chunk.text or positions else []

    @abstractmethod
    def add_prompt_ids(self, chunk: dict[str, Any], token_ids: list[int]) -> None:
        """Add the tokens of a choice's prompt to its first chunk."""

    def opening(self) -> dict[str, Any] | None:
        """Return the delta that begins each choice of a stream, or None."""
        return None

    def ending(self, end: ChoiceEnd | None) -> dict[str, Any]:
        """Return the fields of a chunk's choice about its end, whether reached or not."""
        reason, stop = end or (None, None)
        return {"finish_reason": reason, "stop_reason": stop}

    def body(self, head: AnswerHead, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """Return the body of a whole answer."""
        made = [
            self.choice(choice) | ChoiceEnd(choice.finish_reason, choice.stop_reason)._asdict() for choice in choices
        ]
        return self._envelope(head, self.body_object, made) | {"usage": usage.as_openai()}

    def chunk(
        self, head: AnswerHead, index: int, delta: dict[str, Any], end: ChoiceEnd | None = None
    ) -> dict[str, Any]:
        """Return one event of a stream, of choice `index`."""
        return self._envelope(head, self.chunk_object, [{"index": index} | delta | self.ending(end)])

    def usage_chunk(self, head: AnswerHead, usage: Usage) -> dict[str, Any]:
        """Return the last event of a stream that asked for `include_usage`."""
        return self._envelope(head, self.chunk_object, []) | {"usage": usage.as_openai()}

    def _envelope(self, head: AnswerHead, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        envelope: dict[str, Any] = {
            "id": head.id,
            "object": kind,
            "created": head.created,
            "model": head.model,
            "choices": choices,
            "system_fingerprint": head.system_fingerprint,
        }
        if head.service_tier is not None:
            envelope["service_tier"] = head.service_tier
        return envelope
