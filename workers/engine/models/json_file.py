"""Read the JSON files of a model's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from workers.engine.messages.errors import ModelLoadError
from workers.model_folder import pointer_problem


def read_json(file: Path) -> dict[str, Any]:
    """Return the object in a file. Raise ModelLoadError."""
    content = _read(file)
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file} holds no JSON object")
    return content


def read_json_list(file: Path) -> list[dict[str, Any]]:
    """Return the list of objects in a file. Raise ModelLoadError."""
    content = _read(file)
    if not isinstance(content, list) or not all(isinstance(item, dict) for item in content):
        raise ModelLoadError(f"{file} holds no list of JSON objects")
    return content


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise ModelLoadError(f"{file} does not exist") from error
    except (OSError, ValueError) as error:
        raise ModelLoadError(pointer_problem(file) or f"{file} cannot be read: {error}") from error
