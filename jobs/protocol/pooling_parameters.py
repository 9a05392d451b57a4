"""The parameters of calls that return numbers, each declared once.

A declaration is a field of `PoolingParameters` or a row of `POOLING_UNSUPPORTED`. The declarations
define how a body is read, its JSON Schema, and the tables of `docs/requests.md`.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from jobs.protocol import fields
from jobs.protocol.declared import DeclaredParameter, ParameterTypes, declared_on
from jobs.protocol.value_types import (
    Boolean,
    Integer,
    OneOf,
    Schema,
    Text,
    Truncation,
    Unsupported,
    ValueType,
    must_be,
)

EMBEDDINGS = "/v1/embeddings"
SCORE = "/v1/score"
RERANK = "/v1/rerank"
CLASSIFY = "/v1/classify"
POOLING = "/v1/pooling"

_ALL = (EMBEDDINGS, SCORE, RERANK, CLASSIFY, POOLING)
_OF_TEXTS = (EMBEDDINGS, CLASSIFY, POOLING)
_OF_VECTORS = (EMBEDDINGS, POOLING)

EMBED_DTYPES = {"float32": "f", "float16": "e"}
"""Types of the numbers in an answer, and their codes in `struct` and numpy."""


@dataclass(frozen=True)
class PoolingParameter:
    """The type of a parameter, its description, and its endpoints."""

    values: ValueType
    does: str
    urls: tuple[str, ...] = _ALL
    default: str = ""  # for a table, if the field's own default does not tell


class PoolingParameters(msgspec.Struct, frozen=True, kw_only=True):
    """A call's parameters, except its texts and its model."""

    dimensions: Annotated[
        int | None,
        PoolingParameter(
            Integer(1),
            "the first so many numbers of each embedding, of a model that was trained for it",
            _OF_VECTORS,
            "all",
        ),
    ] = None
    encoding_format: Annotated[
        str,
        PoolingParameter(
            OneOf(("float", "base64")), "base64: the bytes of the numbers, little-endian", _OF_VECTORS, "float"
        ),
    ] = "float"
    embed_dtype: Annotated[
        str,
        PoolingParameter(
            OneOf(tuple(EMBED_DTYPES)), "the type of the numbers, to which they are rounded", _OF_VECTORS, "float32"
        ),
    ] = "float32"
    use_activation: Annotated[
        bool | None,
        PoolingParameter(
            Boolean(), "embeddings: normalize them; else: sigmoid or softmax, as the model says", default="the model's"
        ),
    ] = None
    add_special_tokens: Annotated[
        bool, PoolingParameter(Boolean(), "texts get the tokens that the model expects around them", _OF_TEXTS)
    ] = True
    prompt_name: Annotated[
        str | None,
        PoolingParameter(
            Text(256),
            "what texts begin with: one of the prompts that the model's folder names",
            _OF_VECTORS,
            "the model's",
        ),
    ] = None
    truncate_prompt_tokens: Annotated[
        int | None,
        PoolingParameter(Truncation(), "cut longer texts to that many tokens; -1: to as many as the model can take"),
    ] = None
    truncation_side: Annotated[
        str | None,
        PoolingParameter(
            OneOf(("left", "right")), "where they are cut; right keeps the beginning", default="the model's"
        ),
    ] = None
    priority: Annotated[
        int,
        PoolingParameter(
            Integer(-fields.INT32 - 1),
            "lower runs first, among the live calls of a tenant and among batch lines; vLLM's meaning",
        ),
    ] = 0
    task: Annotated[
        str | None,
        PoolingParameter(
            OneOf(("embed", "classify", "token_embed")),
            "token_embed: one row for each token",
            (POOLING,),
            "the model's",
        ),
    ] = None
    top_n: Annotated[int, PoolingParameter(Integer(0), "results to return, best first; 0: all", (RERANK,))] = 0
    return_documents: Annotated[
        bool, PoolingParameter(Boolean(), "results contain the documents' texts", (RERANK,))
    ] = True


_NOT_YET = Unsupported()
_NO_LIMIT = Unsupported((0,), "must be 0: texts are cut by 'truncate_prompt_tokens' only.")
POOLING_UNSUPPORTED: dict[str, ValueType] = {
    "normalize": Unsupported((), "must be left out: 'use_activation' says whether embeddings are normalized."),
    "messages": _NOT_YET,
    "padding": must_be("do_not_pad"),
    "endianness": Unsupported(("native", "little"), "must be 'little'."),
    "max_tokens_per_query": _NO_LIMIT,
    "max_tokens_per_doc": _NO_LIMIT,
    "instruction": _NOT_YET,
    "chat_template": _NOT_YET,
    "chat_template_kwargs": _NOT_YET,
    "mm_processor_kwargs": _NOT_YET,
    "cache_salt": _NOT_YET,
    "stream": must_be(False),
}
"""Parameters of vLLM that are not supported here; unknown ones are ignored."""


def pooling_rows() -> list[DeclaredParameter[PoolingParameter]]:
    """Return the declared parameters in their order."""
    return declared_on(PoolingParameters, PoolingParameter)


_ROWS = pooling_rows()
_TYPES = {
    url: ParameterTypes(
        POOLING_UNSUPPORTED, {row.name: row.parameter.values for row in _ROWS if url in row.parameter.urls}
    )
    for url in _ALL
}


def read_pooling_parameters(body: dict[str, Any], url: str) -> dict[str, Any]:
    """Return the values of `PoolingParameters` that a body sets, each read independently.

    Raise `ApiError` 400 for a bad value and for an unsupported one.
    """
    return _TYPES[url].read(body)


def pooling_columns(url: str) -> tuple[str, ...]:
    """Return the names of an endpoint's declared parameters."""
    return tuple(row.name for row in _ROWS if url in row.parameter.urls)


def pooling_names(url: str) -> frozenset[str]:
    """Return the names of an endpoint's parameters, also of those that cannot be honored."""
    return _TYPES[url].names


def pooling_schemas(url: str) -> dict[str, Schema]:
    """Return the JSON Schema of each parameter, in the form that `read_pooling_parameters`
    accepts.
    """
    return _TYPES[url].schemas()
