"""`/tokenize` and `/detokenize`, as vLLM has them: live calls that a worker's tokenizer answers."""

from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from api.auth import AuthorizedRoute
from api.http.openapi import json_body
from api.routes.live_calls import answer
from api.state import state_of
from jobs.protocol.endpoints import TOKENIZER_ENDPOINTS
from jobs.protocol.tokenization import DETOKENIZE, TOKENIZE, TokenizerCall
from jobs.protocol.validation import decode_body

router = APIRouter(route_class=AuthorizedRoute)

_TOKENS = {"type": "array", "items": {"type": "integer"}}


def _answered(**properties: Any) -> dict[int | str, dict[str, Any]]:
    """Return `responses` of a route whose answer has these properties."""
    schema = {"type": "object", "required": list(properties), "properties": properties}
    return {200: {"description": "The answer.", "content": {"application/json": {"schema": schema}}}}


@router.post(
    TOKENIZE,
    responses=_answered(
        count={"type": "integer"},
        max_model_len={"type": "integer"},
        tokens=_TOKENS,
        token_strs={"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
    ),
    response_class=Response,
    openapi_extra=json_body({"type": "object"}),
)
async def tokenize(request: Request) -> Response:
    """Return the tokens of a text, or of a chat as the model's template renders it."""
    return await _answer(request, TOKENIZE)


@router.post(
    DETOKENIZE,
    responses=_answered(prompt={"type": "string"}),
    response_class=Response,
    openapi_extra=json_body({"type": "object"}),
)
async def detokenize(request: Request) -> Response:
    """Return the text of tokens."""
    return await _answer(request, DETOKENIZE)


async def _answer(request: Request, url: str) -> Response:
    """Answer a call; without `model` it is for the only model, if there is one."""
    models = (await state_of(request).fleet.snapshot()).callable_names
    return await answer(request, partial(_parse, url, models[0] if len(models) == 1 else None))


def _parse(url: str, default_model: str | None, raw: bytes) -> TokenizerCall:
    return TOKENIZER_ENDPOINTS[url].read(decode_body(raw), default_model)
