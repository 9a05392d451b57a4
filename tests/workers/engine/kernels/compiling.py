"""Compiles kernels to machine code for GPUs that are absent, and reports what the code takes.

In a process of its own: the one that tests kernels under Triton's interpreter cannot compile them.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# : Bytes of shared memory that one program may use, by compute capability (CUDA C++ programming
# guide, "Technical specifications").
SHARED_MEMORY = {80: 163 << 10, 90: 227 << 10}


@dataclass(frozen=True)
class KernelVariant:
    """A kernel as one launch would specialize it.

    Of the constants, "tl.bfloat16" and the like are Triton's types.
    """

    module: str
    kernel: str
    signature: dict[str, str]  # of each parameter that is no constant: "*bf16", "i32", "fp32"
    constants: dict[str, Any]
    warps: int = 4
    stages: int = 3
    # Parameters known to be multiples of 16, as pointers of torch's are
    aligned: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class Code:
    """What a kernel was compiled to."""

    registers: int  # of a thread
    spilled: int  # bytes of a thread's local memory
    shared: int  # bytes of a program
    opcodes: dict[str, int]  # SASS instructions by their name before the first dot
    ptx: str


def compiled(variants: Sequence[KernelVariant], capability: int) -> list[Code]:
    """Raise AssertionError with the compiler's words where a kernel does not compile."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    asked = json.dumps([asdict(variant) for variant in variants])
    command = [sys.executable, "-m", __spec__.name if __spec__ else __name__, str(capability)]
    done = subprocess.run(
        command, input=asked, capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[4]
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [Code(**code) for code in json.loads(done.stdout)]


def _compile(variant: KernelVariant, capability: int) -> Code:
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(variant.module), variant.kernel)
    constants = {
        n: getattr(tl, v[3:]) if isinstance(v, str) and v.startswith("tl.") else v for n, v in variant.constants.items()
    }
    signature = {name: variant.signature.get(name, "constexpr") for name in kernel.arg_names}
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in variant.aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": variant.warps, "num_stages": variant.stages}
    code = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    usage, sass = _disassembled(code.asm["cubin"])
    opcodes: dict[str, int] = {}
    for opcode in re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z0-9]+)", sass, re.MULTILINE):
        opcodes[opcode] = opcodes.get(opcode, 0) + 1
    numbers = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage))
    return Code(
        int(numbers["REG"]),
        int(numbers["STACK"]) + int(numbers["LOCAL"]),
        code.metadata.shared,
        opcodes,
        code.asm["ptx"],
    )


def _disassembled(cubin: bytes) -> tuple[str, str]:
    """Resource usage and SASS, as the tool that comes with Triton prints them."""
    from triton import knobs

    tool = knobs.nvidia.cuobjdump.path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return _output([tool, "-res-usage", file.name]), _output([tool, "-sass", file.name])


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    asked = [KernelVariant(**{**given, "aligned": tuple(given["aligned"])}) for given in json.load(sys.stdin)]
    json.dump([asdict(_compile(variant, int(sys.argv[1]))) for variant in asked], sys.stdout)
