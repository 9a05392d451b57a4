"""`/version`, open to every client, and `/server_info`: models, workers and limits."""

from dataclasses import fields
from typing import Any

from fastapi import APIRouter, Request

from api.fleet import Snapshot
from api.http_settings import ALIVE
from api.settings import ApiSettings
from api.state import state_of
from jobs.queue.registry import WorkerRecord
from jobs.version import version

router = APIRouter()
open_router = APIRouter()

_SHOWN_TEXTS = ("completion_windows",)
"""Settings of text that are shown: others may be addresses, passwords or paths."""


@open_router.get(ALIVE)
async def show_version() -> dict[str, str]:
    """Return the version of the package."""
    return {"version": version()}


@router.get("/server_info")
async def server_info(request: Request) -> dict[str, Any]:
    """Return the version, the models with their workers, and the numbers among the settings.

    No address, name of a host, path or secret is shown.
    """
    state = state_of(request)
    snapshot = await state.fleet.snapshot()
    listed = snapshot.listed(record.name for record in snapshot.served)
    return {
        "version": version(),
        "api_version": "v1",
        "models": [
            {"id": record.name, "max_model_len": record.max_model_len, "endpoints": record.endpoints}
            for record in snapshot.served
            if record.name in listed
        ],
        "workers": _workers(snapshot),
        "settings": _settings(state.settings),
    }


def _workers(snapshot: Snapshot) -> list[dict[str, Any]]:
    return [_worker(worker) for worker in snapshot.workers]


def _worker(worker: WorkerRecord) -> dict[str, Any]:
    """Return a worker and its engine; the engine's values are null while it loads."""
    engine = worker.engine
    return {
        "state": worker.state,
        "models": [name for name in worker.models if name not in worker.aliases],
        "max_model_len": worker.max_model_len or None,
        "device": engine and engine.device,
        "dtype": engine and engine.dtype,
        "backend": engine and engine.backend,
        "max_num_seqs": engine and engine.max_num_seqs,
        "system_fingerprint": engine and engine.system_fingerprint,
    }


def _settings(settings: ApiSettings) -> dict[str, Any]:
    """Return numbers, and few texts by name, so that no later setting is shown by mistake."""
    values = {one.name: getattr(settings, one.name) for one in fields(settings) if "help" in one.metadata}
    return {name: value for name, value in values.items() if isinstance(value, int | float) or name in _SHOWN_TEXTS}
