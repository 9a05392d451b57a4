"""`/v1/models`: what the workers that are ready serve."""

from typing import Any

from fastapi import APIRouter, Request

from api.fleet import model_not_found
from api.state import state_of
from jobs.queue.registry import ModelRecord

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """All models that can be called now."""
    snapshot = await state_of(request).fleet.snapshot()
    return {"object": "list", "data": [_as_openai(record) for record in snapshot.served]}


@router.get("/v1/models/{name:path}")
async def retrieve_model(request: Request, name: str) -> dict[str, Any]:
    """One of them; the name may hold slashes."""
    snapshot = await state_of(request).fleet.snapshot()
    for record in snapshot.served:
        if record.name == name:
            return _as_openai(record)
    raise model_not_found(name, [record.name for record in snapshot.served])


def _as_openai(record: ModelRecord) -> dict[str, Any]:
    return {
        "id": record.name,
        "object": "model",
        "created": int(record.created),
        "owned_by": "pipeline",
        "root": record.name,
        "parent": None,
        "max_model_len": record.max_model_len,
    }
