"""Products with quantized weights compile for the GPUs that count, in the registers and memory that
they have.
"""

import pytest
import torch

from tests.workers.engine.kernels.compiling import SHARED_MEMORY, Code, KernelVariant, compiled
from tests.workers.engine.kernels.test_compile import NAMES, SPILLED
from workers.engine.kernels.quantized_matmul import block_k, tiles

MODULE = "workers.engine.kernels.quantized_matmul"
KINDS = ("int4", "int8", "float8")
ROWS = (16, 32, 64, 128)
FLOAT8_SINCE = 89  # compute capability


def multiply(kind: str, rows: int, group_size: int, dtype: str = "bf16", parts: bool = False) -> KernelVariant:
    choice = tiles(rows, {short: of for of, (short, _) in NAMES.items()}[dtype])
    signature = {
        "x": f"*{dtype}",
        "values": "*i16",
        "scales": "*fp32",
        "bias": f"*{dtype}",
        "out": "*fp32" if parts else f"*{dtype}",
        **dict.fromkeys(("rows", "n", "k", "width", "each"), "i32"),
    }
    constants = {
        "GROUP": group_size,
        "FLOAT8": kind == "float8",
        "BITS": 4 if kind == "int4" else 8,
        "BLOCK_M": choice.block_m,
        "BLOCK_N": choice.tile,
        "BLOCK_K": block_k(group_size, 4 if kind == "int4" else 8),
        "PTX": dtype != "fp32",
    }
    if kind == "int4":
        signature["zeros"] = "*fp32"
    else:
        constants["zeros"] = None
    if parts:
        del signature["bias"]
        constants["bias"] = None
    pointers = tuple(name for name, of in signature.items() if of[0] == "*")
    aligned = (*pointers, "n", "k", "width")
    return KernelVariant(MODULE, "_multiply", signature, constants, choice.warps, choice.stages, aligned)


def dequantize(kind: str, group_size: int) -> KernelVariant:
    signature = {"values": "*i16", "scales": "*fp32", "out": "*bf16"}
    constants = {
        "GROUP": group_size,
        "FLOAT8": kind == "float8",
        "BITS": 4 if kind == "int4" else 8,
        "BLOCK_N": 64,
        "BLOCK_K": block_k(group_size, 4 if kind == "int4" else 8),
    }
    if kind == "int4":
        signature["zeros"] = "*fp32"
    else:
        constants["zeros"] = None
    aligned = (*signature, "n", "k", "width")
    signature |= dict.fromkeys(("first", "n", "k", "width"), "i32")
    return KernelVariant(MODULE, "_dequantize", signature, constants, aligned=aligned)


def check(variants: dict[str, KernelVariant], capability: int) -> dict[str, Code]:
    found = dict(zip(variants, compiled(list(variants.values()), capability), strict=True))
    for name, code in found.items():
        print(f"sm_{capability} {name}: {code.registers} registers, {code.spilled} spilled, {code.shared} bytes shared")
        assert code.spilled <= SPILLED[torch.bfloat16], name
        assert code.shared <= SHARED_MEMORY[capability], name
    return found


def kinds(capability: int) -> list[str]:
    return [kind for kind in KINDS if kind != "float8" or capability >= FLOAT8_SINCE]


@pytest.mark.proof
@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_every_number_of_rows_compiles(capability: int) -> None:
    found = check(
        {
            f"{kind}, {rows} rows, groups of {group_size or 'whole rows'}": multiply(kind, rows, group_size)
            for kind in kinds(capability)
            for rows in ROWS
            for group_size in (128, 0)
        },
        capability,
    )
    for name, code in found.items():
        assert "cp.async.cg.shared.global" in code.ptx, name  # 16 bytes at once
        if capability >= 90:
            assert "HGMMA" in code.opcodes, name
            assert "I2F" not in code.opcodes, name  # integers are converted by permutations of bytes


@pytest.mark.proof
@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_narrow_groups_parts_and_other_dtypes_compile(capability: int) -> None:
    check(
        {
            f"{kind}, {rows} rows, {dtype}, groups of {group_size}": multiply(kind, rows, group_size, dtype, parts=True)
            for kind in kinds(capability)
            for rows in (16, 128)
            for dtype, group_size in (("fp16", 32), ("bf16", 16), ("fp32", 64))
        },
        capability,
    )


@pytest.mark.proof
@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_what_comes_before_and_after_compiles(capability: int) -> None:
    sizes = dict.fromkeys(("rows", "n", "parts"), "i32")
    signature = {"sums": "*fp32", "out": "*bf16", **sizes}
    variants = [KernelVariant(MODULE, "_add_parts", signature, {"bias": None, "BLOCK": 1024}, aligned=("n",))]
    variants += [dequantize(kind, group_size) for kind in kinds(capability) for group_size in (128, 16, 0)]
    if capability >= FLOAT8_SINCE:
        variants += [
            KernelVariant(
                "workers.engine.kernels.scaled_matmul",
                "_quantize_rows",
                {"x": "*bf16", "out": "*fp8e4nv", "scales": "*fp32", "size": "i32"},
                {"WIDTH": width, "LARGEST": 448.0, "TINY": 1e-30},
                min(max(width // 512, 4), 16),
                3,
                ("x", "out", "size"),
            )
            for width in (1024, 16384)
        ]
    for code in compiled(variants, capability):
        assert code.spilled == 0
