"""A checkpoint of 4 bits made from one in 16 bits, in the format `pack-quantized` of
compressed-tensors: each number is rounded to one of 16 values, evenly spaced from the least to the
largest number of its group.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_BITS, _GROUP_SIZE = 4, 64
_MOST = 15
_IN_WORD = 32 // _BITS


def quantize_checkpoint(folder: Path, to: Path) -> None:
    """Write the checkpoint of one file in `folder` with its layers' projections in 4 bits."""
    to.mkdir(parents=True, exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | {"quantization_config": _settings()}, indent=2))
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        module = name.removesuffix(".weight")
        tensors |= _packed(module, tensor) if module.endswith("_proj") else {name: tensor}
    save_file(tensors, to / "model.safetensors")
    for file in folder.glob("tokenizer*.json"):  # last: their presence marks a complete folder
        shutil.copy(file, to)


def _settings() -> dict[str, Any]:
    weights = {
        "num_bits": _BITS,
        "type": "int",
        "strategy": "group",
        "group_size": _GROUP_SIZE,
        "symmetric": False,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


def _packed(module: str, weight: Tensor) -> dict[str, Tensor]:
    rows, columns = weight.shape
    groups = weight.float().reshape(rows, columns // _GROUP_SIZE, _GROUP_SIZE)
    least, most = groups.amin(-1).clamp_(max=0), groups.amax(-1).clamp_(min=0)
    scales = ((most - least) / _MOST).to(weight.dtype)
    zeros = (-least / scales.float()).round_()
    numbers = ((groups / scales.float()[..., None]).round_() + zeros[..., None]).clamp_(0, _MOST).reshape(rows, columns)
    return {
        f"{module}.weight_packed": _words(numbers),
        f"{module}.weight_scale": scales,
        f"{module}.weight_zero_point": _words(zeros.t()).t().contiguous(),
        f"{module}.weight_shape": torch.tensor([rows, columns]),
    }


def _words(numbers: Tensor) -> Tensor:
    """Return numbers [a, b] from 0 to 15 as int32 [a, ceil(b / 8)], the first lowest."""
    filled = torch.nn.functional.pad(numbers.int(), (0, -numbers.shape[1] % _IN_WORD))
    shifts = torch.arange(0, 32, _BITS, dtype=torch.int32)
    return (filled.unflatten(1, (-1, _IN_WORD)) << shifts).sum(-1, dtype=torch.int32)
