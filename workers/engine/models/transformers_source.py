"""Find in transformers' source, without importing it, why one of its classes cannot run here."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from workers.engine.messages.errors import ModelLoadError
from workers.engine.models.config import Json

REMOTE_CODE = "it needs the code in its own repository, which is never run; choose a model without it"
STATEFUL = "it keeps a state beside its keys and values"
CLOSED = "transformers' class does not take attention functions from outside"


def refusal(name: str, why: str) -> ModelLoadError:
    return ModelLoadError(f"transformers' {name} cannot run on this engine: {why}")


def unknown_class() -> str:
    return f"transformers {version('transformers')} has no causal language model of that name"


def find_objection(name: str, raw: Json) -> str | None:
    """Return why a decoder's class cannot run here, or None if its source does not say."""
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        return None
    models, kind = Path(spec.origin).parent / "models", str(raw.get("model_type")).replace("-", "_")
    if f'"{name}"' not in _text(models / "auto" / "modeling_auto.py", f'"{name}"'):
        return REMOTE_CODE if raw.get("auto_map") else unknown_class()
    source = _text(models / kind / f"modeling_{kind}.py")
    if f"\nclass {name}(" not in source:
        return None
    if "_is_stateful = True" in source:
        return STATEFUL
    return None if "_supports_attention_backend = True" in source else CLOSED


def _text(file: Path, default: str = "") -> str:
    return file.read_text() if file.is_file() else default
