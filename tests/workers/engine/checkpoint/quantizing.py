"""Checkpoints of each format, packed one number at a time as its documentation says.

Numbers are chosen at random within the range of a format, and the matrix that they mean is computed
beside them: the numbers that a reader of the checkpoint returns.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.workers.engine.models.tiny_models import folder

Parts = dict[str, Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output that each nibble of a word has


@dataclass(frozen=True)
class Quantized:
    """One matrix as a checkpoint stores it, and what it means in `dtype`."""

    parts: Parts
    plain: Tensor  # [n, k]


Packer = Callable[[int, int, torch.Generator], Quantized]


@dataclass(frozen=True)
class Case:
    """A way of quantizing a whole checkpoint."""

    settings: dict[str, Any]  # quantization_config
    pack: Packer
    dtype: torch.dtype = torch.float16


def signed(word: int) -> int:
    """Return a word of 32 bits as safetensors' int32 has it."""
    return word - (1 << 32) if word >= 1 << 31 else word


def pack_words(numbers: list[int], bits: int) -> list[int]:
    """Return unsigned numbers in words, the first one in the lowest bits; the last word is padded
    with zeros.
    """
    per_word = 32 // bits
    found = []
    for first in range(0, len(numbers), per_word):
        word = 0
        for place, number in enumerate(numbers[first : first + per_word]):
            word |= number << (bits * place)
        found.append(signed(word))
    return found


def int32(rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def draw(low: int, high: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return integers from `low` up to `high`, both of which there are."""
    numbers = torch.randint(low, high + 1, shape, generator=generator)
    numbers.view(-1)[:2] = torch.tensor([low, high])[: numbers.numel()]
    return numbers


def draw_scales(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype, size: float) -> Tensor:
    return ((torch.rand(shape, generator=generator) + 0.5) * size).to(dtype)


def meaning(
    values: list[list[float]], scale_of: Callable[[int, int], float], zero_of: Callable[[int, int], float], dtype: Any
) -> Tensor:
    """Return (value - zero) * scale by row and column, in float32 rounded to `dtype`."""
    rows = [
        [(value - zero_of(row, column)) * scale_of(row, column) for column, value in enumerate(line)]
        for row, line in enumerate(values)
    ]
    return torch.tensor(rows, dtype=torch.float64).float().to(dtype)


@cache
def gptq(bits: int, group_size: int, *, act_order: bool = False, sym: bool = True, v2: bool = False) -> Case:
    size_of = float(2.0 ** -(bits + 1))

    def pack(n: int, k: int, generator: torch.Generator) -> Quantized:
        size = k if group_size == -1 else group_size
        groups = -(-k // size)
        values = draw(0, 2**bits - 1, (k, n), generator).tolist()
        zeros = draw(0, 2**bits - 1, (groups, n), generator).tolist()
        if sym:
            zeros = [[2 ** (bits - 1)] * n for _ in range(groups)]
        scales = draw_scales((groups, n), generator, torch.float16, size_of)
        order = [column // size for column in range(k)]
        if act_order:
            order = [order[place] for place in torch.randperm(k, generator=generator).tolist()]
        columns = [pack_words([values[row][column] for row in range(k)], bits) for column in range(n)]
        stored = [pack_words(line, bits) for line in zeros]
        if not v2:
            ones = int("1".rjust(bits, "0") * (32 // bits), 2)
            stored = [[signed((word - ones) % (1 << 32)) for word in line] for line in stored]
        parts = {
            "qweight": int32(columns).t().contiguous(),
            "qzeros": int32(stored),
            "scales": scales,
            "g_idx": torch.tensor(order, dtype=torch.int32),
        }
        by_row = [[float(values[column][row]) for column in range(k)] for row in range(n)]
        plain = meaning(
            by_row,
            lambda row, column: float(scales[order[column], row]),
            lambda row, column: zeros[order[column]][row],
            torch.float16,
        )
        return Quantized(parts, plain)

    settings = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "desc_act": act_order,
        "sym": sym,
        "checkpoint_format": "gptq_v2" if v2 else "gptq",
    }
    return Case(settings, pack)


@cache
def awq(group_size: int) -> Case:
    def pack_line(numbers: list[int]) -> list[int]:
        found = []
        for first in range(0, len(numbers), 8):
            word = 0
            for place in range(8):
                word |= numbers[first + AWQ_ORDER[place]] << (4 * place)
            found.append(signed(word))
        return found

    def pack(n: int, k: int, generator: torch.Generator) -> Quantized:
        size = k if group_size == -1 else group_size
        groups = -(-k // size)
        values = draw(0, 15, (k, n), generator).tolist()
        zeros = draw(0, 15, (groups, n), generator).tolist()
        scales = draw_scales((groups, n), generator, torch.float16, 0.03)
        parts = {
            "qweight": int32([pack_line(line) for line in values]),
            "qzeros": int32([pack_line(line) for line in zeros]),
            "scales": scales,
        }
        by_row = [[float(values[column][row]) for column in range(k)] for row in range(n)]
        plain = meaning(
            by_row,
            lambda row, column: float(scales[column // size, row]),
            lambda row, column: zeros[column // size][row],
            torch.float16,
        )
        return Quantized(parts, plain)

    settings = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": group_size, "zero_point": True}
    return Case(settings, pack)


@cache
def fp8(block: tuple[int, int] | None) -> Case:
    """DeepSeek's blocks; without, a scale for each matrix."""

    def pack(n: int, k: int, generator: torch.Generator) -> Quantized:
        values = (torch.randn((n, k), generator=generator) * 100).to(torch.float8_e4m3fn)
        height, width = block or (n, k)
        scales = draw_scales((-(-n // height), -(-k // width)), generator, torch.float32, 0.002)
        plain = meaning(
            values.float().tolist(),
            lambda row, column: float(scales[row // height, column // width]),
            lambda row, column: 0.0,
            torch.bfloat16,
        )
        scale = {"weight_scale_inv": scales} if block else {"weight_scale": scales[0, 0], "input_scale": torch.ones(1)}
        return Quantized({"weight": values, **scale}, plain)

    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block and list(block)}
    return Case(settings, pack, torch.bfloat16)


def compressed(stored: str, weights: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """Return a quantization_config of compressed-tensors."""
    activations = {"num_bits": 8, "type": weights.get("type", "int"), "dynamic": True}
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "sparsity_config": {"format": "dense"},
        "transform_config": {},
    } | settings


def with_activations(case: Case, activations: dict[str, Any] | None) -> Case:
    """Return a case of compressed-tensors with other `input_activations`."""
    scheme = case.settings["config_groups"]["group_0"] | {"input_activations": activations}
    return replace(case, settings=case.settings | {"config_groups": {"group_0": scheme}})


@cache
def numbers(strategy: str, *, floats: bool = False, symmetric: bool = True, stored: str | None = None) -> Case:
    """compressed-tensors' numbers one by one: int8 or float8, with bfloat16 scales."""
    block = (32, 48)

    def pack(n: int, k: int, generator: torch.Generator) -> Quantized:
        if floats:
            values = (torch.randn((n, k), generator=generator) * 100).to(torch.float8_e4m3fn)
        else:
            values = draw(-128, 127, (n, k), generator).to(torch.int8)
        height, width = {"tensor": (n, k), "channel": (1, k), "block": block}[strategy]
        scales = draw_scales((-(-n // height), -(-k // width)), generator, torch.bfloat16, 0.002)
        zeros = draw(-128, 127, tuple(scales.shape), generator).to(torch.int8)
        plain = meaning(
            values.float().tolist(),
            lambda row, column: float(scales[row // height, column // width]),
            lambda row, column: 0.0 if symmetric else float(zeros[row // height, column // width]),
            torch.bfloat16,
        )
        shape = (1,) if strategy == "tensor" else tuple(scales.shape)
        parts = {"weight": values, "weight_scale": scales.reshape(shape)}
        return Quantized(parts if symmetric else parts | {"weight_zero_point": zeros.reshape(shape)}, plain)

    weights = {
        "num_bits": 8,
        "type": "float" if floats else "int",
        "strategy": strategy,
        "symmetric": symmetric,
        "group_size": None,
        "block_structure": list(block) if strategy == "block" else None,
    }
    return Case(compressed(stored or ("float-quantized" if floats else "int-quantized"), weights), pack, torch.bfloat16)


@cache
def packed(bits: int, group_size: int, *, symmetric: bool = True, act_order: bool = False) -> Case:
    """compressed-tensors' packed integers; a group size of -1 is a scale for each row."""
    half = 2 ** (bits - 1)

    def pack(n: int, k: int, generator: torch.Generator) -> Quantized:
        size = k if group_size == -1 else group_size
        groups = -(-k // size)
        values = draw(-half, half - 1, (n, k), generator).tolist()
        zeros = draw(-half, half - 1, (n, groups), generator).tolist()
        scales = draw_scales((n, groups), generator, torch.bfloat16, 2.0 ** -(bits + 1))
        order = [column // size for column in range(k)]
        if act_order:
            order = [order[place] for place in torch.randperm(k, generator=generator).tolist()]
        parts = {
            "weight_packed": int32([pack_words([number + half for number in line], bits) for line in values]),
            "weight_scale": scales,
            "weight_shape": torch.tensor([n, k]),
        }
        if act_order:
            parts["weight_g_idx"] = torch.tensor(order, dtype=torch.int32)
        if not symmetric:
            by_group = [[zeros[row][group] + half for row in range(n)] for group in range(groups)]
            parts["weight_zero_point"] = int32([pack_words(line, bits) for line in by_group]).t().contiguous()
        plain = meaning(
            values,
            lambda row, column: float(scales[row, order[column]]),
            lambda row, column: 0.0 if symmetric else zeros[row][order[column]],
            torch.bfloat16,
        )
        return Quantized(parts, plain)

    weights = {
        "num_bits": bits,
        "type": "int",
        "strategy": "channel" if group_size == -1 else "group",
        "symmetric": symmetric,
        "group_size": None if group_size == -1 else group_size,
        "actorder": "group" if act_order else None,
    }
    return Case(compressed("pack-quantized", weights), pack, torch.bfloat16)


def write(case: Case, path: Path, kept: tuple[str, ...] = ()) -> tuple[Path, Path]:
    """Write two checkpoints of the tiny llama: one with its projections quantized, but those of the
    modules `kept`, and the plain one that means the same.
    """
    stored, plain = _weights(case.pack, case.dtype, kept)
    ways = (("quantized", stored, {"quantization_config": case.settings}), ("plain", plain, {}))
    for way, tensors, changes in ways:
        shutil.copytree(folder("llama"), path / way)
        edit(path / way / "config.json", dtype=str(case.dtype).removeprefix("torch."), **changes)
        save_file(tensors, path / way / "model.safetensors")
    return path / "quantized", path / "plain"


@cache
def _weights(pack: Packer, dtype: torch.dtype, kept: tuple[str, ...]) -> tuple[Parts, Parts]:
    """Return the tensors of both; what each number means is computed one by one, which takes
    long.
    """
    generator = torch.Generator().manual_seed(3)
    stored: Parts = {}
    plain: Parts = {}
    for name, tensor in load_file(folder("llama") / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if not name.endswith("_proj.weight") or module in kept:
            stored[name] = plain[name] = tensor.to(dtype)
            continue
        found = pack(*tensor.shape, generator)
        stored.update({f"{module}.{part}": value for part, value in found.parts.items()})
        plain[name] = found.plain
    return stored, plain


def edit(file: Path, **changes: Any) -> None:
    """Change keys of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change(path: Path, changes: Callable[[Parts], None]) -> None:
    """Change the tensors of a checkpoint."""
    tensors = load_file(path / "model.safetensors")
    changes(tensors)
    save_file(tensors, path / "model.safetensors")
