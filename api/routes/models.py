"""`/v1/models`: what workers serve, or are about to."""

import time
from typing import Any

from fastapi import APIRouter, Request

from api.fleet import Snapshot, model_not_found, not_served
from api.state import state_of

router = APIRouter()

_STARTED = time.time()


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """All models that can be called now (`status` "ready") or soon ("loading")."""
    snapshot = await state_of(request).fleet.snapshot()
    return {"object": "list", "data": list(_models(snapshot).values())}


@router.get("/v1/models/{name:path}")
async def retrieve_model(request: Request, name: str) -> dict[str, Any]:
    """One of them; the name may hold slashes. 503 while none of its workers is there, 404 for one
    that never had any.
    """
    snapshot = await state_of(request).fleet.snapshot()
    found = _models(snapshot).get(name)
    if found is None:
        if name in snapshot.models:
            raise not_served(name, snapshot)
        raise model_not_found(name, [record.name for record in snapshot.served])
    return found


def _models(snapshot: Snapshot) -> dict[str, dict[str, Any]]:
    """Those that are ready first; a model that was never served has no length yet."""
    served = {
        record.name: _as_openai(record.name, "ready", record.created, record.max_model_len)
        for record in snapshot.served
    }
    loading = {}
    for name in snapshot.loading:
        known = snapshot.models.get(name)
        created, length = (known.created, known.max_model_len) if known else (_STARTED, None)
        loading[name] = _as_openai(name, "loading", created, length)
    return served | loading


def _as_openai(name: str, status: str, created: float, max_model_len: int | None) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": int(created),
        "owned_by": "pipeline",
        "root": name,
        "parent": None,
        "max_model_len": max_model_len,
        "status": status,
    }
