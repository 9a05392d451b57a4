"""The defaults of a worker's model for what a call leaves unset: of its generation_config.json, and
of --override-generation-config.
"""

import json
from pathlib import Path
from typing import Any

from jobs.protocol.default_parameters import DefaultParameters, read_generation
from workers.errors import WorkerError
from workers.model_folder import (
    NO_GENERATION,
    OWN_GENERATION,
    generation_file,
    pointer_problem,
    transformer_folder,
)
from workers.settings import WorkerSettings, read_override


def local_defaults(settings: WorkerSettings) -> DefaultParameters | None:
    """Return the defaults, or None if they are in files of the hub. Raises WorkerError."""
    folder = Path(settings.engine.model).expanduser()
    if settings.engine.generation_config == OWN_GENERATION and not folder.is_dir():
        return None
    return defaults_in(folder, settings)


def defaults_in(folder: Path, settings: WorkerSettings) -> DefaultParameters:
    """Return the defaults of the model in `folder`. Raises WorkerError."""
    source, override = settings.engine.generation_config, read_override(settings.override_generation_config)
    if source == NO_GENERATION:
        return read_generation(override)
    own = transformer_folder(folder)
    file = generation_file(own, source)
    values = {} if file.parent == own and not file.exists() else _read(file)
    try:
        return read_generation(values | override)
    except ValueError as error:
        raise WorkerError(
            f"{file}: {error}: give another value with --override-generation-config, or --generation-config vllm"
        ) from None


def _read(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_bytes())
    except OSError as error:
        raise WorkerError(f"--generation-config: {file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise WorkerError(pointer_problem(file) or f"{file} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise WorkerError(f"{file} holds no JSON object")
    return values


def shown(defaults: DefaultParameters) -> str:
    """Return the defaults for a log line."""
    return ", ".join(f"{name} {value:g}" for name, value in defaults.items())
