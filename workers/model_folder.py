"""Where in a model's folder its files are."""

import json
from pathlib import Path

MODULES = "modules.json"
"""What sentence-transformers lists the modules of a model in."""


def transformer_folder(folder: Path) -> Path:
    """Return where config.json, tokenizer and weights are: in the folder that `modules.json` names
    first, if there is a config.json, else in `folder`.

    A `modules.json` that cannot be read counts as none.
    """
    try:
        inner = folder / json.loads((folder / MODULES).read_bytes())[0]["path"]
    except (OSError, ValueError, LookupError, TypeError):
        return folder
    return inner if (inner / "config.json").is_file() else folder
