"""`/v1/embeddings`, as OpenAI has it, and `/v1/score`, `/v1/rerank`, `/v1/classify`, `/v1/pooling`.

The last four are vLLM's. All are live calls that a worker answers with numbers.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from api.auth import AuthorizedRoute
from api.http.openapi import json_body
from api.routes.live_calls import answer
from jobs.protocol.endpoints import POOLING_ENDPOINTS
from jobs.protocol.pooling_endpoint import PoolingCall
from jobs.protocol.pooling_parameters import CLASSIFY, EMBEDDINGS, POOLING, RERANK, SCORE
from jobs.protocol.validation import decode_body

_Route = Callable[[Request], Awaitable[Response]]

router = APIRouter(route_class=AuthorizedRoute)

_NUMBER, _INTEGER, _STRING = {"type": "number"}, {"type": "integer"}, {"type": "string"}
_NUMBERS = {"type": "array", "items": _NUMBER}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties}


_USAGE = _object(prompt_tokens=_INTEGER, total_tokens=_INTEGER)


def _listed(**properties: Any) -> dict[int | str, dict[str, Any]]:
    """Return `responses` of a route whose answer lists objects with these properties."""
    data = {"type": "array", "items": _object(index=_INTEGER, **properties)}
    named = {"id": _STRING, "object": {"const": "list"}, "created": _INTEGER, "model": _STRING}
    return _answered(_object(**named, data=data, usage=_USAGE))


def _answered(schema: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    return {200: {"description": "The answer.", "content": {"application/json": {"schema": schema}}}}


def _by_aliases_of(url: str) -> Callable[[_Route], _Route]:
    """Answer calls under an endpoint's aliases too, which the OpenAPI document leaves out."""

    def decorate(route: _Route) -> _Route:
        for alias in POOLING_ENDPOINTS[url].aliases:
            router.post(alias, include_in_schema=False)(route)
        return route

    return decorate


_RANKED = {
    "type": "object",
    "required": ["index", "relevance_score"],
    "properties": {"index": _INTEGER, "relevance_score": _NUMBER, "document": _object(text=_STRING)},
}
_RERANKED = _object(id=_STRING, model=_STRING, usage=_USAGE, results={"type": "array", "items": _RANKED})
_EMBEDDING = _object(object={"const": "embedding"}, index=_INTEGER, embedding={"anyOf": [_NUMBERS, _STRING]})
_EMBEDDED = _object(object={"const": "list"}, model=_STRING, usage=_USAGE, data={"type": "array", "items": _EMBEDDING})
_BODY = json_body({"type": "object"})


@router.post(EMBEDDINGS, responses=_answered(_EMBEDDED), response_class=Response, openapi_extra=_BODY)
async def embeddings(request: Request) -> Response:
    """Return a vector for each text."""
    return await _answer(request, EMBEDDINGS)


@_by_aliases_of(SCORE)
@router.post(
    SCORE,
    responses=_listed(object={"const": "score"}, score=_NUMBER),
    response_class=Response,
    openapi_extra=_BODY,
)
async def score(request: Request) -> Response:
    """Return how well pairs of texts belong together."""
    return await _answer(request, SCORE)


@_by_aliases_of(RERANK)
@router.post(RERANK, responses=_answered(_RERANKED), response_class=Response, openapi_extra=_BODY)
async def rerank(request: Request) -> Response:
    """Return documents by their relevance for a query."""
    return await _answer(request, RERANK)


@router.post(
    CLASSIFY,
    responses=_listed(label={"type": ["string", "null"]}, probs=_NUMBERS, num_classes=_INTEGER),
    response_class=Response,
    openapi_extra=_BODY,
)
async def classify(request: Request) -> Response:
    """Return the probability of each class, for each text."""
    return await _answer(request, CLASSIFY)


@router.post(
    POOLING,
    responses=_listed(
        object={"const": "pooling"},
        data={"anyOf": [_NUMBERS, {"type": "array", "items": _NUMBERS}, _STRING]},
    ),
    response_class=Response,
    openapi_extra=_BODY,
)
async def pooling(request: Request) -> Response:
    """Return the output of the model's pooler for each text."""
    return await _answer(request, POOLING)


async def _answer(request: Request, url: str) -> Response:
    return await answer(request, partial(_parse, url))


def _parse(url: str, raw: bytes) -> PoolingCall:
    return POOLING_ENDPOINTS[url].read(decode_body(raw))
