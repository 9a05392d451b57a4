"""What the kernels around attention are compiled to: they spill nothing, and read and write memory
in wide accesses.
"""

import re
from dataclasses import replace

import pytest

from tests.workers.engine.kernels.compiling import SHARED_MEMORY, KernelVariant, compiled

WORKERS = "workers.engine.kernels"
STRIDES = {"token_stride": "i32", "head_stride": "i32", "angle_stride": "i32"}
CACHE = {
    "cache": "*bf16",
    "slot_mapping": "*i64",
    "values_stride": "i64",
    "block_stride": "i32",
    "cache_head_stride": "i32",
}
HEAD = {"heads": 16, "kv_heads": 8, "BLOCK_SIZE": 16, "HEAD_DIM": 128, "HALF": 64, "HEADS": 8}
DRAW = {
    **dict.fromkeys(
        ("table", "slots", "lengths", "prompt_lengths", "best", "tokens", "counts", "greedy", "drawn", "out"), "*i32"
    ),
    **dict.fromkeys(("largest", "scores", "measured", "found", "distances"), "*fp32"),
    **dict.fromkeys(("stride", "vocab", "span", "parts"), "i32"),
}
PIVOTS = (0.5, 1.0, 2.0, 3.5, 5.5, 8.0, 11.0, 15.0)
PARTED = {"PARTS": 64, "BLOCK": 2048}


def variant(
    module: str,
    kernel: str,
    parameters: dict[str, str],
    constants: dict[str, object],
    warps: int = 4,
    loose: tuple[str, ...] = (),
) -> KernelVariant:
    """All pointers and strides but `loose` ones are multiples of 16, as those of the models' shapes
    are.
    """
    aligned = tuple(name for name, kind in parameters.items() if kind != "fp32" and name not in loose)
    return KernelVariant(f"{WORKERS}.{module}", kernel, parameters, constants, warps, aligned=aligned)


def draw(kernel: str, names: str, logits: str, **constants: object) -> KernelVariant:
    parameters = {"logits": f"*{logits}"} | {
        name: DRAW[name] for name in (*names.split(), "stride", "vocab", "span", "parts")
    }
    return variant("sampling", kernel, parameters, constants, warps=8, loose=("span", "parts"))


def norm(dtype: str, size: int, rows: int, warps: int, **absent: None) -> KernelVariant:
    tensors = {name: f"*{dtype}" for name in ("x", "residual", "weight", "bias", "out") if name not in absent}
    constants = {"ROWS": rows, "WIDTH": size, **absent}
    return variant(
        "norm",
        "_norm",
        tensors | {"count": "i32", "size": "i32", "stride": "i32", "eps": "fp32"},
        constants,
        warps,
        loose=("count",),
    )


ASKED = "table slots lengths prompt_lengths largest"
VARIANTS = {
    "add rms": norm("bf16", 1024, 1, 4, bias=None),
    "add layer": norm("fp16", 1024, 1, 4),
    "rms of long rows": norm("bf16", 8192, 1, 16, bias=None, residual=None),
    "rms of heads": norm("fp32", 128, 8, 4, bias=None, residual=None),
    "silu": variant(
        "activation", "_silu_times_up", {"gate_up": "*bf16", "out": "*bf16", "width": "i32"}, {"BLOCK": 1024}
    ),
    "rotary with norms": variant(
        "rotary",
        "_rotate_and_write",
        dict.fromkeys(("qkv", "cos", "sin", "query_weight", "key_weight", "q"), "*bf16")
        | CACHE
        | STRIDES
        | {"eps": "fp32"},
        HEAD | {"query_bias": None, "key_bias": None},
    ),
    "rotary with layer norms": variant(
        "rotary",
        "_rotate_and_write",
        dict.fromkeys(("qkv", "cos", "sin", "query_weight", "query_bias", "key_weight", "key_bias", "q"), "*bf16")
        | CACHE
        | STRIDES
        | {"eps": "fp32"},
        HEAD | {"BY_HEAD": True, "NORM_LAST": True},
    ),
    "rotary": variant(
        "rotary",
        "_rotate_and_write",
        dict.fromkeys(("qkv", "cos", "sin", "q"), "*bf16") | CACHE | STRIDES | {"eps": "fp32"},
        HEAD | dict.fromkeys(("query_weight", "query_bias", "key_weight", "key_bias")),
    ),
    "write": variant(
        "rotary",
        "_write",
        dict.fromkeys(("k", "v"), "*bf16")
        | CACHE
        | dict.fromkeys(("key_stride", "key_head_stride", "value_stride", "value_head_stride"), "i32"),
        {"kv_heads": 12, "BLOCK_SIZE": 16, "HEAD_DIM": 64, "HEADS": 16, "WIDTH": 64},
    ),
    "masks": variant(
        "grammar_mask",
        "_mask_rows",
        {"logits": "*fp32", "rows": "*i64", "masks": "*i32", **dict.fromkeys(("stride", "vocab", "words"), "i32")},
        {"WORDS": 64},
        loose=("words",),
    ),
    "largest": draw("_largest", "largest best counts", "bf16", BLOCK=2048),
    "draw": draw("_draw_parts", f"{ASKED} scores drawn", "bf16", **PARTED),
    "draw float32": draw("_draw_parts", f"{ASKED} scores drawn", "fp32", **PARTED),
    "measure": draw("_measure", "table slots largest measured", "bf16", PIVOTS=PIVOTS, **PARTED),
    "gather": draw(
        "_gather",
        "table slots largest measured found distances tokens counts",
        "bf16",
        PIVOTS=PIVOTS,
        GATHERED=4096,
        **PARTED,
    ),
    "choose": draw(
        "_choose",
        f"{ASKED} greedy scores drawn measured found distances tokens counts out",
        "bf16",
        GATHERED=4096,
        **PARTED,
    ),
}


@pytest.mark.proof
def test_a_cache_of_8_bits_is_written_by_instructions_that_saturate() -> None:
    writing = [VARIANTS[name] for name in ("rotary with norms", "rotary", "write")]
    narrow = [replace(each, signature=each.signature | {"cache": "*fp8e4nv"}) for each in writing]
    for code in compiled(narrow, 90):
        assert code.spilled == 0
        assert "cvt.rn.satfinite.e4m3x2" in code.ptx


@pytest.mark.proof
@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_nothing_is_spilled(capability: int) -> None:
    for name, code in zip(VARIANTS, compiled(list(VARIANTS.values()), capability), strict=True):
        print(f"sm_{capability} {name}: {code.registers} registers, {code.shared} bytes shared")
        assert code.spilled == 0, name
        assert code.shared <= SHARED_MEMORY[capability] // 4, name
        assert re.search(r"ld\.global[\w.:]*(v4\.b32|v2\.b64|v2\.b32|b64)", code.ptx), name
