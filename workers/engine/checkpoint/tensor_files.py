"""The safetensors files of a model's folder, and the tensors in them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from workers.engine.checkpoint.quantized_matrix import Reader
from workers.engine.messages.errors import ModelLoadError
from workers.engine.models.json_file import read_json
from workers.model_folder import pointer_problem, weights_problem

_INDEX = "model.safetensors.index.json"
# Some repositories hold a second copy of the weights, under their author's own names
CONSOLIDATED = "consolidated*"
_OTHERS = (CONSOLIDATED, "adapter_*")


def tensor_readers(folder: Path) -> dict[str, Reader]:
    """Return a reader for each tensor, by name; the index selects the files if there is one."""
    return {name: partial(handle.get_tensor, name) for handle, name in _stored_tensors(folder)}


def tensor_shapes(folder: Path) -> dict[str, list[int]]:
    return {name: handle.get_slice(name).get_shape() for handle, name in _stored_tensors(folder)}


def _stored_tensors(folder: Path) -> Iterator[tuple[Any, str]]:
    """Yield each open file with the name of a tensor in it. Raise ModelLoadError."""
    for file in weight_files(folder):
        try:
            handle: Any = safe_open(file, framework="pt")
            names = list(handle.keys())
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{file} cannot be read as safetensors: {error}") from error
        yield from ((handle, name) for name in names)


def weight_files(folder: Path) -> list[Path]:
    """Return the files with a model's tensors. Raise ModelLoadError."""
    index = folder / _INDEX
    if index.is_file():
        files = [folder / name for name in sorted(set(read_json(index).get("weight_map", {}).values()))]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ModelLoadError(
                f"{folder} lacks {len(missing)} of the files that {_INDEX} names, the first is {missing[0]}"
            )
    else:
        others = {file for pattern in _OTHERS for file in folder.glob(pattern)}
        files = sorted(set(folder.glob("*.safetensors")) - others)
    if problem := next(filter(None, map(pointer_problem, files)), None if files else weights_problem(folder)):
        raise ModelLoadError(problem)
    return files
