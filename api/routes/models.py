"""`/v1/models`: models that workers serve, load, or would load for a call."""

import time
from typing import Any

from fastapi import APIRouter, Request

from api.fleet import Snapshot, model_not_found, not_served
from api.state import state_of

router = APIRouter()

_STARTED = time.time()


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """Return all models, each by one name: `status` is "ready", "loading", or "unloaded" if a call
    loads it.
    """
    snapshot = await state_of(request).fleet.snapshot()
    models = _models(snapshot)
    listed = set(snapshot.listed(models))
    return {"object": "list", "data": [model for name, model in models.items() if name in listed]}


@router.get("/v1/models/{name:path}")
async def retrieve_model(request: Request, name: str) -> dict[str, Any]:
    """Return a model, whose name may hold slashes.

    503 while none of its workers is there, 404 if it never had any.
    """
    snapshot = await state_of(request).fleet.snapshot()
    found = _models(snapshot).get(name)
    if found is None:
        if snapshot.was_served(name):
            raise not_served(name, snapshot)
        raise model_not_found(name, snapshot.callable_names)
    return found


def _models(snapshot: Snapshot) -> dict[str, dict[str, Any]]:
    """Return the ready models, then the others; one that was never served has no length yet."""
    served = {
        record.name: _as_openai(record.name, "ready", record.created, record.max_model_len)
        for record in snapshot.served
    }
    others = {}
    for name in dict.fromkeys([*snapshot.loading, *snapshot.on_demand]):
        if name not in served:
            known = snapshot.models.get(name)
            created, length = (known.created, known.max_model_len) if known else (_STARTED, None)
            others[name] = _as_openai(name, "loading" if name in snapshot.loading else "unloaded", created, length)
    return served | others


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
        "loaded": status == "ready",
    }
