"""Find a model's folder: a local one, or the snapshot of a repository of the hub."""

from __future__ import annotations

import os
from pathlib import Path

from workers.engine.checkpoint.tensor_files import CONSOLIDATED
from workers.engine.messages.errors import ModelLoadError
from workers.model_folder import folder_problem

# All folders of a repository, except sentence-transformers' modules such as 1_Pooling
_NOT_NEEDED = ["[!0-9]*/*", CONSOLIDATED]


def find_folder(name: str, with_weights: bool = True) -> Path:
    """Return the local folder `name`, or the snapshot of the hub repository `name`, perhaps without
    its weights.

    Raises ModelLoadError.
    """
    path = Path(name).expanduser()
    if path.exists():
        return _checked(path)
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ModelLoadError(f"the model folder {name} does not exist")
    return _checked(_download(name, with_weights))


def _checked(path: Path) -> Path:
    """Return the path. Raise ModelLoadError unless it may be a model's folder."""
    if problem := folder_problem(path):
        raise ModelLoadError(problem)
    return path


def _download(name: str, with_weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    patterns = ["*.safetensors", "*.json"] if with_weights else ["*.json"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=_NOT_NEEDED))
    except GatedRepoError as error:
        raise ModelLoadError(
            f"the model {name} needs an accepted license; accept it on the hub and set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelLoadError(
            f"there is no folder {name}, and the hub has no model of that name that this user may read"
        ) from error
    except HFValidationError as error:
        raise ModelLoadError(f"there is no folder {name}, and it is not a valid model name on the hub") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, RuntimeError) as error:
        where = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
        raise ModelLoadError(
            f"there is no folder {name}, and the hub at {where} cannot be reached ({type(error).__name__}); "
            "download the model and give its folder"
        ) from error
