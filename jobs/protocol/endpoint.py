"""What an endpoint is, and what one of text in and text out is: how its prompt is read, and what
its answers look like. `chat.py` and `completions.py` are two of these, `endpoints.py` lists all.
Those of `pooling_endpoint.py` give numbers instead.
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
"""What a model does for the endpoints that it answers; score: one number for a pair of texts."""


class AnswerHead(NamedTuple):
    """What all chunks of a stream, and the body of an answer, have in common."""

    id: str
    model: str
    created: int  # unix seconds
    system_fingerprint: str | None = None  # of the worker
    service_tier: str | None = None  # what the call's came to, where it names one


class ChoiceEnd(NamedTuple):
    """Why a choice ended."""

    finish_reason: FinishReason
    stop_reason: int | str | None = None


class Endpoint(ABC):
    """One endpoint; it holds no state."""

    url: ClassVar[str]
    aliases: ClassVar[tuple[str, ...]] = ()  # other urls under which calls come
    tasks: ClassVar[tuple[Task, ...]]  # a model that does any of them answers it

    @property
    @abstractmethod
    def body_schema(self) -> Schema:
        """Which bodies it takes, as a JSON Schema; of a `TextEndpoint` only the members that there
        must be.
        """


class BatchEndpoint(Endpoint):
    """One whose calls may also be lines of batches."""

    prompt_field: ClassVar[str]  # the parameter that the call is about
    number_column: ClassVar[Literal["", "embedding", "score"]] = ""
    """The column of a Parquet file of results that holds the answer to one input."""

    @property
    def text_names(self) -> tuple[tuple[str, ...], ...]:
        """The parameters that hold a call's texts; each item is another way to name all of them."""
        return ((self.prompt_field,),)

    @cached_property
    def members(self) -> frozenset[str]:
        """The members that a body may have; others are ignored."""
        return frozenset({"model", *IGNORED, *itertools.chain(*self.text_names), *self.parameter_names})

    @property
    @abstractmethod
    def parameter_names(self) -> frozenset[str]:
        """The parameters of a call, `model` and the texts aside."""

    @property
    def takes_one_text(self) -> bool:
        """Whether a text is all that a call needs, the model aside."""
        return self.text_names == ((self.prompt_field,),)

    def body_of_text(self, text: str) -> dict[str, Any]:
        """Return what the body of a call about one text says of it."""
        return {self.prompt_field: text}

    @property
    @abstractmethod
    def file_columns(self) -> tuple[str, ...]:
        """The other parameters that a row of a Parquet file can have, `model` aside."""

    @property
    def name(self) -> str:
        """What OpenAI calls it: "Chat Completions"."""
        return self.url.removeprefix("/v1/").replace("/", " ").title()

    @abstractmethod
    def check_body(self, body: dict[str, Any], prefix: str) -> None:
        """Raise `ApiError` for the body of a line that lacks what the call is about, or has it in
        another JSON type.
        """

    @abstractmethod
    def expected_length(self, body: dict[str, Any]) -> int:
        """Return by what the lines of a file are ordered, longest first: the tokens of the answer
        as far as the body says, or, where none are generated, the size of the texts.

        The body may hold anything that `check_body` lets pass.
        """

    @abstractmethod
    def prefix_texts(self, body: dict[str, Any]) -> Iterable[str]:
        """Return the pieces of the prompt whose beginning is better computed once for all lines
        that share it; none where the order by length matters more.
        """


class TextEndpoint(BatchEndpoint):
    """One whose answers are generated."""

    tasks = ("generate",)
    is_chat: ClassVar[bool]  # which of a parameter's types count
    usual_tokens: ClassVar[int]  # expected of an answer that the body does not bound
    prompt_schema: ClassVar[Schema]
    id_prefix: ClassVar[str]
    body_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def new_id(self) -> str:
        """Return an `id` for a response body; a stream carries one through all its chunks."""
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
        """Return the prompt that a body gives. Raise `ApiError` where there must be one."""
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
        """Return the fields of a `Call` that the prompt gives, each prompt to be answered `answers`
        times. Raise `ApiError`.
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
        """Return what a chunk's choice says of new text; None at its end. `offsets` finds where the
        tokens begin; with `as_ids` log probabilities name them by their ids.
        """

    def deltas(
        self, chunk: TokenChunk, positions: Sequence[PositionLogprobs], offsets: TextOffsets, as_ids: bool
    ) -> list[dict[str, Any]]:
        """Return what the choices of one or more chunks say of new tokens; of those that give
        nothing to show, nothing.
        """
        return [self.delta(chunk.text, positions, offsets, as_ids)] if chunk.text or positions else []

    @abstractmethod
    def add_prompt_ids(self, chunk: dict[str, Any], token_ids: list[int]) -> None:
        """Add the tokens of a choice's prompt to its first chunk."""

    def opening(self) -> dict[str, Any] | None:
        """Return the delta that begins each choice of a stream, if one does."""
        return None

    def ending(self, end: ChoiceEnd | None) -> dict[str, Any]:
        """Return what a chunk's choice says of its end, which has come or not."""
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
