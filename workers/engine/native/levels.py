"""The instruction sets of the libraries in a wheel, and those of this processor."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_WIDE = "-mprefer-vector-width=512"


@dataclass(frozen=True, slots=True)
class Level:
    """One instruction set."""

    name: str
    flags: tuple[str, ...]  # of gcc and clang
    features: frozenset[str]  # required of the processor, with their names in /proc/cpuinfo


def _level(name: str, flags: str, features: str, below: Level | None = None) -> Level:
    """Return a level with the flags and features of the level `below` and more."""
    known, needed = (below.flags, below.features) if below else ((), frozenset[str]())
    return Level(name, (*known, *flags.split()), needed | frozenset(features.split()))


_V3_FEATURES = "cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3 avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"
_V4_FEATURES = "avx512f avx512bw avx512cd avx512dq avx512vl"
_V3 = _level("x86-64-v3", "-march=x86-64-v3", _V3_FEATURES)
_AVX_VNNI = _level("avx-vnni", "-mavxvnni", "avx_vnni", _V3)
_V4 = _level("x86-64-v4", f"-march=x86-64-v4 {_WIDE}", _V4_FEATURES, _V3)
_VNNI = _level("avx512-vnni", "-mavx512vnni", "avx512_vnni", _V4)
# Every processor with products of bfloat16 has VNNI.
_BF16 = _level("avx512-bf16", "-mavx512bf16", "avx512_bf16", _VNNI)
_AMX = _level("amx", "-mamx-tile -mamx-bf16 -mamx-int8", "amx_tile amx_bf16 amx_int8", _BF16)
_ARM = _level("armv8.2", "-march=armv8.2-a", "fp asimd asimdrdm atomics crc32")
_DOT = _level("armv8.2-dotprod", "-march=armv8.2-a+dotprod", "asimddp", _ARM)
_I8MM = _level("armv8.2-i8mm", "-march=armv8.2-a+dotprod+i8mm", "i8mm", _DOT)

LEVELS = {"x86_64": (_V3, _AVX_VNNI, _V4, _VNNI, _BF16, _AMX), "aarch64": (_ARM, _DOT, _I8MM)}
"""The levels by `platform.machine`, the best last."""

THIS_PROCESSOR = ("-march=native", _WIDE) if platform.machine() == "x86_64" else ("-mcpu=native",)
"""Flags of gcc and clang for all instructions of this processor."""


def fitting_levels(machine: str, features: frozenset[str]) -> list[Level]:
    """Return the levels that a processor with `features` can run, the best first."""
    return [level for level in reversed(LEVELS.get(machine, ())) if level.features <= features]


def processor() -> bytes:
    """Return the lines of /proc/cpuinfo that name the processor and its features."""
    try:
        lines = _CPUINFO.read_bytes().splitlines()
    except OSError:
        return b""
    return b"\n".join(line for line in dict.fromkeys(lines) if line.startswith((b"model name", b"flags", b"Features")))


def processor_features() -> frozenset[str]:
    """Return the features common to all processors of this machine, named as in /proc/cpuinfo."""
    rows = [line.split() for line in processor().decode(errors="replace").splitlines()]
    features = [frozenset(row) for row in rows if row[0] in ("flags", "Features")]
    return frozenset.intersection(*features) if features else frozenset()
