"""The safetensors files of a model's folder, and the tensors in them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from workers.engine.checkpoint.quantized_matrix import Reader
from workers.engine.messages.errors import ModelLoadError
from workers.engine.models.json_file import read_json
from workers.model_folder import pointer_problem, weights_problem

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_INDEX = "model.safetensors.index.json"
# Some repositories hold a second copy of the weights, under their author's own names
CONSOLIDATED = "consolidated*"
_OTHERS = (CONSOLIDATED, "adapter_*")


def tensor_readers(folder: Path) -> dict[str, Reader]:
    """Return a reader for each tensor, by name; the index selects the files if there is one."""
    return {
        name: partial(handle.get_tensor, name)
        for handle in _open_files(folder, "pt")
        for name in handle.keys()  # noqa: SIM118
    }


def shape_readers(folder: Path) -> dict[str, Reader]:
    """Return the same, but only from the files' headers: tensors on the device "meta".

    Tensors of integers with one dimension have their numbers: the shape of a matrix, and the groups
    of its columns. Memory is not taken, also not address space for a checkpoint that is too large.
    """
    return {
        name: partial(_without_numbers, handle, name)
        for handle in _open_files(folder, "np")
        for name in handle.keys()  # noqa: SIM118
    }


def _without_numbers(handle: Any, name: str) -> Tensor:
    header = handle.get_slice(name)
    shape, dtype = header.get_shape(), _DTYPES.get(header.get_dtype(), torch.uint8)
    if len(shape) == 1 and dtype in (torch.int32, torch.int64):
        return torch.from_numpy(handle.get_tensor(name))
    return torch.empty(shape, dtype=dtype, device="meta")


def _open_files(folder: Path, framework: str) -> Iterator[Any]:
    """Yield an open handle of each file of a model. Raise ModelLoadError."""
    for file in weight_files(folder):
        try:
            yield safe_open(file, framework=framework)
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{file} cannot be read as safetensors: {error}") from error


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
