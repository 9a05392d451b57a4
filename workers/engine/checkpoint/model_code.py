"""Choose the code that runs a checkpoint: a family of the engine, or transformers' class."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from workers.engine.layers.weights import PLAIN_VERSION
from workers.engine.messages.errors import ModelLoadError
from workers.engine.models.config import Json
from workers.engine.models.registry import (
    FAMILIES,
    Family,
    find_family,
    find_pooling_family,
    naming_own_code,
    pooling_code,
)

if TYPE_CHECKING:  # importing it takes seconds
    from workers.engine.models.padded_model import PaddedClass
    from workers.engine.models.transformers_model import TransformersClass


def code_for_generating(
    name: str, folder: Path, raw: Json, model_impl: str, quantized: bool
) -> Family | TransformersClass:
    """Return the code that generates for the checkpoint `name`. Raises ModelLoadError."""
    own = find_family(raw, model_impl)
    if quantized:
        _require_own_code(name, raw, own)
    return own or _transformers_class(folder, raw)


def code_for_pooling(
    name: str, folder: Path, raw: Json, task: str, model_impl: str, quantized: bool
) -> Family | PaddedClass:
    """Return the code for a pooling task of the checkpoint `name`. Raises ModelLoadError."""
    own = find_pooling_family(raw, model_impl)
    if quantized:
        _require_own_code(name, raw, own)
    return own or _padded_class(folder, raw, task)


def _require_own_code(name: str, raw: Json, own: Family | None) -> None:
    """Refuse a quantized checkpoint for code that accepts only plain matrices."""
    architecture = raw["architectures"][0]
    if own is None:
        raise ModelLoadError(
            f"the model {name} is quantized, which is not supported for {architecture} by transformers' class;"
            f" {PLAIN_VERSION}"
        )
    if own.transposed:
        raise ModelLoadError(
            f"the model {name} is quantized, which is not supported for {architecture}; {PLAIN_VERSION}"
        )


def _transformers_class(folder: Path, raw: Json) -> TransformersClass:
    from workers.engine.models.transformers_model import find_class

    with naming_own_code(raw, FAMILIES):
        return find_class(folder, raw)


def _padded_class(folder: Path, raw: Json, task: str) -> PaddedClass:
    from workers.engine.models.padded_model import find_padded_class

    with naming_own_code(raw, pooling_code()):
        return find_padded_class(folder, raw, task)
