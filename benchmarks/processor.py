"""The processor that figures are measured on: its model, and the widest of its vector instructions,
since virtual machines give processors with and without them the same name.
"""

import platform
import re
from dataclasses import dataclass
from pathlib import Path

AVX2, AVX512, AVX512_BF16 = "AVX2", "AVX-512", "AVX512-BF16"
_INSTRUCTIONS = {  # by Linux' name of them, from the widest down
    "amx_bf16": "AMX-BF16",
    "avx512_bf16": AVX512_BF16,
    "avx512f": AVX512,
    "avx2": AVX2,
    "bf16": "NEON-BF16",
    "asimd": "NEON",
}
_GENERATIONS = {("AuthenticAMD", "26"): "Zen 5"}
"""Generations whose names equal those of earlier ones, by maker and family."""
_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Processor:
    """A model of processor with the widest of its instructions."""

    model: str
    instructions: str

    @property
    def title(self) -> str:
        return f"{self.model} ({self.instructions})"

    @property
    def folder(self) -> str:
        """The name of the folder with its files of results."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")


def this_processor(cpuinfo: Path = _CPUINFO) -> Processor:
    """Return the first processor of this machine, from /proc/cpuinfo."""
    fields = dict(re.findall(r"^(.*?)\s*: (.*)$", cpuinfo.read_text().split("\n\n", 1)[0], re.MULTILINE))
    flags = fields.get("flags", fields.get("Features", "")).split()
    instructions = next((name for flag, name in _INSTRUCTIONS.items() if flag in flags), "no vectors")
    generation = _GENERATIONS.get((fields.get("vendor_id", ""), fields.get("cpu family", "")))
    model = fields.get("model name", platform.machine())
    return Processor(model if generation is None else f"{model} {generation}", instructions)
