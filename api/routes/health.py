"""`/health` and `/ready`: whether this process works, and whether a model can be called.

Neither waits for long when Redis is away.
"""

from collections import Counter
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from api.fleet import Snapshot
from api.state import state_of
from jobs.queue.scripts import QueueUnavailable

router = APIRouter()

_UNAVAILABLE: dict[int | str, dict[str, Any]] = {503: {"description": "Not now.", "content": {"application/json": {}}}}


@router.get("/health", responses=_UNAVAILABLE)
async def health(request: Request) -> Response:
    """Return 200 while the queue answers and takes calls, with the workers by state, else 503."""
    state = state_of(request)
    try:
        snapshot = await state.fleet.probe()
    except QueueUnavailable:
        return _not_now({"status": "queue unavailable"})
    if snapshot.write_fault:
        return _not_now({"status": "queue unavailable", "reason": snapshot.write_fault})
    content: dict[str, Any] = {
        "status": "ok",
        "workers": dict(Counter(worker.state for worker in snapshot.workers)),
        "models": _served(snapshot),
        "live_calls": state.reader.calls,
    }
    return JSONResponse(content)


@router.get("/ready", responses=_UNAVAILABLE)
async def ready(request: Request) -> Response:
    """Return 200 once a model can be called, else 503 with the reason; for load balancers."""
    try:
        snapshot = await state_of(request).fleet.probe()
    except QueueUnavailable:
        return _not_now({"status": "not ready", "reason": "the queue is out of reach"})
    if snapshot.write_fault:
        return _not_now({"status": "not ready", "reason": snapshot.write_fault})
    if models := snapshot.callable_names:
        return JSONResponse({"status": "ready", "models": models})
    loading = ", ".join(snapshot.listed(snapshot.loading))
    return _not_now({"status": "not ready", "reason": f"loading {loading}" if loading else "no worker serves a model"})


def _served(snapshot: Snapshot) -> list[str]:
    return snapshot.listed(record.name for record in snapshot.served)


def _not_now(content: dict[str, Any]) -> Response:
    return JSONResponse(content, 503, {"retry-after": "1"})
