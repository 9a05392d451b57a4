"""`/health`: whether this process can do its work, and the workers behind it."""

from collections import Counter
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from api.state import state_of
from jobs.queue.scripts import QueueUnavailable

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while the queue answers, 503 otherwise; workers by state, for a person or a probe."""
    state = state_of(request)
    try:
        snapshot = await state.fleet.snapshot(fresh=True)
    except QueueUnavailable:
        return JSONResponse({"status": "queue unavailable"}, 503)
    content: dict[str, Any] = {
        "status": "ok",
        "workers": dict(Counter(worker.state for worker in snapshot.workers)),
        "models": [record.name for record in snapshot.served],
        "live_calls": state.reader.calls,
    }
    return JSONResponse(content)
