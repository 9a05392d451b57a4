"""From the values of the model flags to what a worker runs with."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jobs.settings import QueueSettings
from pipeline.errors import Refused
from pipeline.options import MODEL_FLAGS
from workers.engine.config import EngineConfig
from workers.settings import DEMO_MODEL, WorkerSettings

_ENGINE = tuple(name for name in MODEL_FLAGS if name not in ("served_model_name", "chat_template"))


def worker_settings(model: str | None, redis_url: str, values: Mapping[str, Any]) -> WorkerSettings:
    """The settings of a worker for `model` (None: the one that ships). Raises `Refused`."""
    check_model_folder(model)
    try:
        return WorkerSettings(
            redis_url=redis_url,
            engine=EngineConfig(model=model or DEMO_MODEL, **{name: values[name] for name in _ENGINE}),
            queue=QueueSettings(redis_url=redis_url, lease_seconds=values["lease_seconds"], stream_interval=values["stream_interval"]),
            served_model_names=tuple(values["served_model_name"]),
            chat_template=values["chat_template"],
            **{name: values[name] for name in ("shutdown_timeout",) if name in values},
        )
    except ValueError as error:
        raise Refused(str(error)) from None


def check_model_folder(model: str | None) -> None:
    """Raises `Refused` if the model is plainly a local path and nothing is there; the rest is the worker's to find out."""
    looks_local = model is not None and (model.startswith(("/", "./", "../", "~")) or model.count("/") > 1)
    if model is not None and looks_local and not Path(model).is_dir():
        raise Refused(f"there is no model folder {model}")
