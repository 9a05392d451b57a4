"""The base of endpoints that return numbers for texts; `endpoints.py` lists them."""

from __future__ import annotations

import uuid
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import msgspec

from jobs.protocol import fields
from jobs.protocol.endpoint import BatchEndpoint
from jobs.protocol.pooling_parameters import (
    PoolingParameters,
    pooling_columns,
    pooling_names,
    pooling_schemas,
    read_pooling_parameters,
)
from jobs.protocol.text_or_tokens import SOME_TEXT, TOKEN_IDS, read_text_or_tokens, read_token_ids
from jobs.protocol.value_types import Schema

MOST_INPUTS = 2048
"""Most texts of one call; for scores, pairs."""

_BYTES_PER_TOKEN = 4


class PooledOutput(Protocol):
    """A model's output for one input: a row of numbers, or a row per token."""

    def numbers(self) -> list[float]:
        """Return the row."""

    def encoded(self, encoding_format: str) -> msgspec.Raw | str:
        """Return the row as a body contains it: JSON, or base64."""


class PoolingHead(NamedTuple):
    """The members of a body besides its outputs."""

    id: str
    model: str
    created: int  # unix seconds
    prompt_tokens: int
    labels: Sequence[str] = ()  # of the model's classes

    @property
    def usage(self) -> dict[str, int]:
        """Return the `usage` object."""
        return {"prompt_tokens": self.prompt_tokens, "total_tokens": self.prompt_tokens}


class PoolingCall(PoolingParameters, frozen=True, kw_only=True):
    """A valid call; either `inputs` or `documents` is set.

    With `documents`, `queries` has one for each of them, or one for all.
    """

    endpoint: PoolingEndpoint
    model: str
    inputs: Sequence[str | list[int]] = ()  # texts, or lists of token ids
    queries: Sequence[str] = ()
    documents: Sequence[str] = ()
    fields: tuple[str, str] = ("", "")  # the parameters that hold queries and documents
    stream: ClassVar[bool] = False

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Return the pairs of texts to score."""
        queries = [*self.queries] * (len(self.documents) if len(self.queries) == 1 else 1)
        return list(zip(queries, self.documents, strict=True))


class PoolingEndpoint(BatchEndpoint):
    """An endpoint that returns a model's numbers for texts."""

    id_prefix: ClassVar[str]
    shows_vectors: ClassVar[bool] = False  # bodies contain the model's output unchanged

    def read(self, body: Any) -> PoolingCall:
        """Read the body of a call.

        Raise `ApiError` 400 for a bad value, naming it; unknown parameters are ignored.
        """
        body = fields.mapping(body, "body")
        model = fields.text(fields.required(body, "model"), "model", least=1)
        parameters = read_pooling_parameters(body, self.url)
        return PoolingCall(endpoint=self, model=model, **self.read_texts(body), **parameters)

    def new_id(self) -> str:
        """Return an `id` for a response body."""
        return self.id_prefix + uuid.uuid4().hex

    def engine_task(self, call: PoolingCall, tasks: Sequence[str]) -> str:
        """Return the engine's task for each input, given the model's tasks."""
        return "embed" if "embed" in tasks else "classify"

    def read_texts(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a `PoolingCall` that the texts set. Raise `ApiError`."""
        return {"inputs": read_inputs(fields.required(body, self.prompt_field), self.prompt_field)}

    def check_body(self, body: dict[str, Any], prefix: str) -> None:
        value = fields.required(body, self.prompt_field, prefix)
        if not isinstance(value, str | list):
            fields.wrong_type(value, "a string or an array", f"{prefix}{self.prompt_field}")

    @property
    def parameter_names(self) -> frozenset[str]:
        return pooling_names(self.url)

    @property
    def file_columns(self) -> tuple[str, ...]:
        return pooling_columns(self.url)

    def expected_length(self, body: dict[str, Any]) -> int:
        names = next((names for names in self.text_names if all(name in body for name in names)), ())
        return sum(_longest(body[name]) for name in names)

    def prefix_texts(self, body: dict[str, Any]) -> tuple[()]:
        return ()

    @property
    def texts_schema(self) -> Schema:
        """Return the JSON Schema of texts that `read_texts` accepts."""
        return {"required": ["model", self.prompt_field], "properties": {self.prompt_field: INPUTS}}

    @property
    def body_schema(self) -> Schema:
        texts = self.texts_schema
        named = {"model": {"type": "string", "minLength": 1}}
        return {"type": "object", **texts, "properties": named | pooling_schemas(self.url) | texts["properties"]}

    @abstractmethod
    def body(self, call: PoolingCall, head: PoolingHead, outputs: Sequence[PooledOutput]) -> dict[str, Any]:
        """Return the body of an answer, with an output for each input or pair."""


INPUTS: Schema = {
    "anyOf": [
        SOME_TEXT,
        TOKEN_IDS,
        {"type": "array", "minItems": 1, "maxItems": MOST_INPUTS, "items": SOME_TEXT},
        {"type": "array", "minItems": 1, "maxItems": MOST_INPUTS, "items": TOKEN_IDS},
    ]
}
"""The JSON Schema of inputs that `read_inputs` accepts."""


def read_inputs(value: Any, param: str) -> list[str | list[int]]:
    """Return the texts or lists of token ids, none of them empty.

    The value is one text, one list of token ids, or a list of either. Raise `ApiError`.
    """
    if not isinstance(value, list):
        return [read_text_or_tokens(value, param, least=1)]
    fields.array(value, param, least=1)
    if not isinstance(value[0], str | list):
        return [read_token_ids(value, param)]
    fields.array(value, param, MOST_INPUTS)
    return [read_text_or_tokens(item, f"{param}[{i}]", like=value[0], least=1) for i, item in enumerate(value)]


def _longest(value: Any) -> int:
    """Return the bytes of the longest of some texts; token ids count like those of usual text."""
    if not isinstance(value, list):
        return _size(value)
    if value and isinstance(value[0], int):
        return len(value) * _BYTES_PER_TOKEN
    return max((len(item) * _BYTES_PER_TOKEN if isinstance(item, list) else _size(item) for item in value), default=0)


def _size(text: Any) -> int:
    text = text.get("text") if isinstance(text, dict) else text
    return len(text.encode(errors="surrogatepass")) if isinstance(text, str) else 0
