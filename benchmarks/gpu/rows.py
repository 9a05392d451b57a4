"""The rows of the table, in the order of their measurement, with targets and time limits."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.setting import Setting


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table.

    `at_least` and `hoped` are in `unit`; with `of_bound`, they are shares of the row's bound.
    """

    title: str
    measured_by: str  # module of this package, and function
    seconds: float  # that it may take on a GPU before it is given up
    unit: str = ""
    at_least: float | None = None
    hoped: float | None = None
    of_bound: bool = False
    less_is_better: bool = False

    def measure(self, setting: Setting) -> dict[str, Any]:
        """Return the row's figures: `value` is shown in the table, `how` describes the method."""
        module, function = self.measured_by.split(":")
        measure: Callable[[Setting], dict[str, Any]] = getattr(
            importlib.import_module(f"benchmarks.gpu.{module}"), function
        )
        return measure(setting)

    def met(self, figures: dict[str, Any]) -> bool | None:
        """Return whether the figure meets `at_least`, or None if that is unset or undecidable."""
        if self.at_least is None or (self.of_bound and not figures.get("bound")):
            return None
        value = figures["value"] / figures["bound"] if self.of_bound else figures["value"]
        return bool(value <= self.at_least if self.less_is_better else value >= self.at_least)


ROWS = {
    "card": Row("copy bandwidth and bf16 matrix rate", "gpu_rates:measure", 40, "TB/s"),
    "qwen3-0.6b": Row("Qwen3-0.6B, bf16", "engine:qwen3_06b", 110, "tok/s", 0.68, 0.82, of_bound=True),
    "qwen2.5-0.5b": Row(
        "Qwen2.5-0.5B, bf16 (tests the host)", "engine:qwen25_05b", 80, "tok/s", 0.21, 0.32, of_bound=True
    ),
    "decode-attention": Row(
        "decode attention, 256 rows × 1–8k context", "attention:decode", 40, "GB/s", 0.8, 0.9, of_bound=True
    ),
    "prefill-attention": Row(
        "prefill attention, 4–16k tokens, against SDPA with FLASH_ATTENTION", "attention:prefill", 40, "x", 0.9, 1.1
    ),
    "idle": Row(
        "device idle between decode steps, 0.6B, 256 rows",
        "idle:measure",
        50,
        "% of the step",
        5,
        2,
        less_is_better=True,
    ),
    "start-up": Row("start-up to first token, 0.6B, warm disk", "engine:start_up", 40, "s", 15, 8, less_is_better=True),
    "qwen3-8b": Row("Qwen3-8B shape, bf16, 1,024 requests", "engine:qwen3_8b", 150, "tok/s", 0.75, 0.85, of_bound=True),
    "generate-batch": Row(
        "against transformers `generate_batch` on the same GPU", "generate_batch:measure", 100, "x", 3, 8
    ),
    "qwen3-0.6b-fp8": Row("Qwen3-0.6B, bf16, `--kv-cache-dtype fp8`", "engine:qwen3_06b_fp8", 80, "tok/s"),
    "qwen3-8b-int4": Row("Qwen3-8B shape, weights of 4 bits, 64 requests", "engine:qwen3_8b_int4", 80, "tok/s"),
    "qwen3-8b-float8": Row("Qwen3-8B shape, weights in fp8, 64 requests", "engine:qwen3_8b_float8", 80, "tok/s"),
    "quantized-products": Row(
        "products with weights of 4 bits, 1–64 rows, against torch's in bf16", "products:measure", 40, "x"
    ),
    "qwen3-0.6b-queued": Row("Qwen3-0.6B, bf16, 1,024 requests, 256 at a time", "engine:qwen3_06b_queued", 80, "tok/s"),
}
"""Rows with a wide time limit come last, since on a new GPU the first rows also compile and tune
kernels.
"""
