"""Every way to launch the attention kernels compiles for the GPUs that count, in the registers and
memory that they have.
"""

import pytest
import torch

from tests.workers.engine.kernels.compiling import SHARED_MEMORY, Code, KernelVariant, compiled
from workers.engine.kernels.tuning import TileChoice, candidates

MODULE = "workers.engine.kernels.attention"
SPILLED = {
    torch.bfloat16: 96,
    torch.float16: 96,
    torch.float32: 256,
}  # bytes of a thread, by the worst candidate, any Triton since 3.6
NAMES = {
    torch.bfloat16: ("bf16", "tl.bfloat16"),
    torch.float16: ("fp16", "tl.float16"),
    torch.float32: ("fp32", "tl.float32"),
}


def attend(
    kind: str,
    choice: TileChoice,
    dim: int,
    group: int,
    dtype: torch.dtype,
    reaches: tuple[int, int] = (-1, 0),
    bias_reach: int = 0,
    fp8: bool = False,
    *,
    chunk: int = 0,
    limited: bool = False,
) -> KernelVariant:
    """`limited`: by a soft cap and sinks."""
    short, name = NAMES[dtype]
    signature = {
        **dict.fromkeys(("q", "out"), f"*{short}"),
        "cache": "*fp8e4nv" if fp8 else f"*{short}",
        **dict.fromkeys(("block_tables", "records"), "*i32"),
        **dict.fromkeys(("partials", "partial_sums"), "*fp32"),
        "scale": "fp32",
        **dict.fromkeys(("num_blocks", "q_stride", "table_stride"), "i32"),
    }
    constants = {
        "KV_HEADS": 8,
        "GROUP": group,
        "HEAD_DIM": dim,
        "BLOCK_SIZE": 16,
        "BLOCK_STRIDE": 8 * 16 * dim,
        "BEFORE": reaches[0],
        "AFTER": reaches[1],
        "CHUNK": chunk,
        "REACH": bias_reach,
        "BLOCK_M": choice.block_m,
        "BLOCK_Q": 1 if kind == "decode" else choice.block_m // group,
        "BLOCK_D": max(16, 1 << (dim - 1).bit_length()),
        "TILE": choice.tile,
        "PREFILL": kind == "prefill",
        "DOT": "tl.float16" if fp8 else name,
    }
    if bias_reach:
        signature["bias"] = "*fp32"
    else:
        constants["bias"] = None
    if limited:
        signature |= {"sinks": "*fp32", "soft_cap": "fp32"}
    else:
        constants |= {"sinks": None, "soft_cap": None}
    pointers = tuple(parameter for parameter, kind in signature.items() if kind[0] == "*")
    return KernelVariant(MODULE, "attend", signature, constants, choice.warps, choice.stages, (*pointers, "q_stride"))


def plan(rows: int, block_q: int, reaches: tuple[int, int] = (-1, 0), chunk: int = 0) -> KernelVariant:
    signature = {
        **dict.fromkeys(("query_start", "context_lens", "slots", "records", "leaders", "scratch"), "*i32"),
        **dict.fromkeys(("num_rows", "num_pieces", "share"), "i32"),
    }
    constants = {
        "BEFORE": reaches[0],
        "AFTER": reaches[1],
        "CHUNK": chunk,
        "BLOCK_Q": block_q,
        "TILE": 64,
        "MIN_TILES": 8,
        "LEVELS": max(8, (rows - 1).bit_length()),
        "PIECES": 256,
    }
    return KernelVariant(MODULE, "plan", signature, constants)


def combine(dim: int, group: int, limited: bool = False) -> KernelVariant:
    signature = {"records": "*i32", "leaders": "*i32", "out": "*bf16", "partials": "*fp32", "partial_sums": "*fp32"}
    constants = {
        "KV_HEADS": 8,
        "GROUP": group,
        "HEAD_DIM": dim,
        "BLOCK_Q": 1,
        "BLOCK_D": 1 << (dim - 1).bit_length(),
        "BLOCK_M": 16,
    }
    if limited:
        signature["sinks"] = "*fp32"
    else:
        constants["sinks"] = None
    return KernelVariant(MODULE, "combine", signature, constants, aligned=("out", "partials"))


def check(variants: list[KernelVariant], spilled: int, capability: int) -> list[Code]:
    codes = compiled(variants, capability)
    for variant, code in zip(variants, codes, strict=True):
        print(f"sm_{capability} {variant.kernel} {variant.constants} {variant.warps} warps {variant.stages} stages:")
        print(
            f"  {code.registers} registers, {code.spilled} bytes spilled, {code.shared} shared,"
            f" {sum(code.opcodes.values())} instructions"
        )
        assert code.spilled <= spilled
        assert code.shared <= SHARED_MEMORY[capability]
    return codes


@pytest.mark.proof
def test_loads_and_products_are_as_wide_as_they_can_be() -> None:
    """For heads of 128 on sm_90: keys and values by 16-byte asynchronous copies, prompts by the
    matrix units of a warp group.
    """
    choices = {kind: candidates(kind, 128, 2, torch.bfloat16)[0] for kind in ("decode", "prefill")}
    variants = [attend(kind, choice, 128, 2, torch.bfloat16) for kind, choice in choices.items()]
    decode, prefill, _, _ = check([*variants, plan(1024, 1), combine(128, 2)], 0, 90)
    assert "mma.sync" in decode.ptx
    assert "wgmma.mma_async" in prefill.ptx
    for kind, code in (("decode", decode), ("prefill", prefill)):
        choice = choices[kind]
        assert code.opcodes["LDGSTS"] == 2 * (choice.tile * 256 // (16 * 32 * choice.warps)) * choice.stages * (
            2 if kind == "prefill" else 1
        )
        assert "cp.async.cg.shared.global" in code.ptx


@pytest.mark.proof
@pytest.mark.parametrize(
    ("dim", "dtype", "cache_dtype", "capability"),
    [
        (64, torch.bfloat16, torch.bfloat16, 90),
        (128, torch.bfloat16, torch.bfloat16, 90),
        (128, torch.bfloat16, torch.bfloat16, 80),
        (128, torch.float32, torch.float32, 90),
        (64, torch.bfloat16, torch.float8_e4m3fn, 90),
        (128, torch.bfloat16, torch.float8_e4m3fn, 90),
    ],
)
def test_every_candidate_compiles(dim: int, dtype: torch.dtype, cache_dtype: torch.dtype, capability: int) -> None:
    fp8 = cache_dtype == torch.float8_e4m3fn
    variants = [
        attend(kind, choice, dim, 4, dtype, fp8=fp8)
        for kind in ("decode", "prefill")
        for choice in candidates(kind, dim, 4, dtype, cache_dtype)
    ]
    check(variants, SPILLED[dtype], capability)


@pytest.mark.proof
@pytest.mark.parametrize(
    ("dim", "group", "dtype", "reaches", "bias_reach"),
    [
        (80, 7, torch.bfloat16, (1023, 0), 0),
        (96, 1, torch.float16, (-1, 0), 0),
        (256, 16, torch.bfloat16, (511, 0), 0),
        (64, 1, torch.bfloat16, (-1, -1), 128),
        (64, 1, torch.bfloat16, (64, 64), 0),
    ],
)
def test_odd_shapes_compile(
    dim: int, group: int, dtype: torch.dtype, reaches: tuple[int, int], bias_reach: int
) -> None:
    variants = [
        attend(kind, candidates(kind, dim, group, dtype)[0], dim, group, dtype, reaches, bias_reach)
        for kind in ("decode", "prefill")
    ]
    check([*variants, plan(1024, 128 // group, reaches), combine(dim, group)], 64, 90)


@pytest.mark.proof
@pytest.mark.parametrize(
    ("dim", "group", "chunk", "limited"), [(256, 2, 0, True), (64, 8, 0, True), (128, 5, 8192, False)]
)
@pytest.mark.parametrize("capability", [80, 90])
def test_caps_sinks_and_chunks_compile(dim: int, group: int, chunk: int, limited: bool, capability: int) -> None:
    """For heads as in Gemma 2, gpt-oss and Llama 4; sm_80 spills as much without them."""
    reaches, spilled = (chunk - 1, 0), 0 if capability == 90 else 64
    variants = [
        attend(
            kind,
            candidates(kind, dim, group, torch.bfloat16)[0],
            dim,
            group,
            torch.bfloat16,
            reaches,
            chunk=chunk,
            limited=limited,
        )
        for kind in ("decode", "prefill")
    ]
    check([*variants, plan(1024, 128 // group, reaches, chunk), combine(dim, group, limited)], spilled, capability)
