"""Locate the files in a model's folder."""

import json
from pathlib import Path

GENERATION = "generation_config.json"
OWN_GENERATION, NO_GENERATION = "auto", "vllm"
"""Values of --generation-config besides a folder: the model's own; the same, for its stop tokens
alone.
"""

MODULES = "modules.json"
"""The file in which sentence-transformers lists the modules of a model."""


def transformer_folder(folder: Path) -> Path:
    """Return the folder of config.json, tokenizer and weights.

    This is the first folder in `modules.json` if it has a config.json, else `folder`. A
    `modules.json` that cannot be read is ignored.
    """
    try:
        inner = folder / json.loads((folder / MODULES).read_bytes())[0]["path"]
    except (OSError, ValueError, LookupError, TypeError):
        return folder
    return inner if (inner / "config.json").is_file() else folder


def generation_file(folder: Path, source: str) -> Path:
    """Return the generation config of the model in `folder`, by the value of --generation-config.

    The model's own need not exist.
    """
    return (folder if source in (OWN_GENERATION, NO_GENERATION) else Path(source).expanduser()) / GENERATION
