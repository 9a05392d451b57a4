"""Random quantized weights of a real shape, in formats of compressed-tensors: 4 bits in groups of
128 columns, or float8 with a scale for each output.

All bytes are cut out of one random block. Embeddings, head and norms are in bfloat16.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.weights import shapes_of

_BLOCK = 33_554_467  # bytes, a prime, so that no two rows of a matrix are the same
_GROUP_SIZE = 128
_DEVIATION = 0.02  # of weights

Draw = Callable[[int], Tensor]
"""A function that returns the given number of random bytes, uint8."""


@dataclass(frozen=True, slots=True)
class QuantizedKind:
    """A kind of quantized weights.

    `bytes_per_weight` counts the engine's storage, with scales and zero points in float32.
    """

    settings: Mapping[str, Any]
    stored: str
    parts: Callable[[Draw, int, int], dict[str, Tensor]]
    bytes_per_weight: float
    activations: Mapping[str, Any] | None = None


def write_quantized(settings: Mapping[str, Any], folder: Path, kind: str) -> None:
    """Write config.json and safetensors for transformers' configuration `settings`, with the
    layers' projections as one of KINDS.
    """
    quantized = KINDS[kind]
    config, shapes = shapes_of(settings)
    config.quantization_config = {
        "quant_method": "compressed-tensors",
        "format": quantized.stored,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": dict(quantized.settings),
                "input_activations": quantized.activations and dict(quantized.activations),
            }
        },
        "ignore": ["lm_head"],
    }
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    block = torch.randint(0, 256, (_BLOCK,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    tensors: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        module, drawn = name.removesuffix(".weight"), _Drawn(block, name)
        if module.endswith("_proj"):
            tensors |= {f"{module}.{part}": tensor for part, tensor in quantized.parts(drawn, *shape).items()}
        elif len(shape) == 1:
            tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
        else:
            numbers = drawn(prod(shape)).view(torch.int8).to(torch.bfloat16)
            tensors[name] = numbers.mul_(_DEVIATION / 74).view(shape)  # bytes deviate by 74
    save_file(tensors, folder / "model.safetensors")


class _Drawn:
    def __init__(self, block: Tensor, name: str) -> None:
        self._block, self._start = block, sum(name.encode()) * 7919 % len(block)

    def __call__(self, count: int) -> Tensor:
        whole = [self._block] * (count // len(self._block) + 1)
        return torch.cat([self._block[self._start :], *whole])[:count]


def _int4(drawn: Draw, rows: int, columns: int) -> dict[str, Tensor]:
    groups = -(-columns // _GROUP_SIZE)
    return {
        "weight_packed": drawn(rows * columns // 2).view(torch.int32).view(rows, columns // 8),
        "weight_scale": torch.full((rows, groups), _DEVIATION / 4.6, dtype=torch.bfloat16),
        "weight_shape": torch.tensor([rows, columns]),
    }


def _float8(drawn: Draw, rows: int, columns: int) -> dict[str, Tensor]:
    """Return float8 weights below 2, so that none is NaN."""
    values = (drawn(rows * columns) & 0xBF).view(torch.float8_e4m3fn).view(rows, columns)
    return {"weight": values, "weight_scale": torch.full((rows, 1), _DEVIATION / 0.6, dtype=torch.bfloat16)}


KINDS = {
    "int4": QuantizedKind(
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": _GROUP_SIZE, "symmetric": True},
        "pack-quantized",
        _int4,
        1 / 2 + 8 / _GROUP_SIZE,
    ),
    "float8": QuantizedKind(
        {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
        "float-quantized",
        _float8,
        1,
        {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True},
    ),
}
