"""Locate the files in a model's folder."""

import json
from pathlib import Path

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
