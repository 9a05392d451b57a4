"""The share of a decode step in which the device is idle, from the core's trace (`--profile`)."""

import asyncio
import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.gpu.checkpoints import checkpoint
from benchmarks.gpu.engine import config_for, run_pass, with_engine
from benchmarks.gpu.setting import NeedsGpu, Setting
from benchmarks.gpu.workload import even
from workers.engine.client.async_engine import AsyncEngine
from workers.engine.profiling import FIRST_STEP, STEPS

_BETWEEN_STEPS = 5.0  # microseconds; a shorter gap lies between two kernels of one graph


def measure(setting: Setting) -> dict[str, Any]:
    """Measure a trace of 256 decoding rows."""
    if setting.device != "cuda":
        raise NeedsGpu("a trace of a CPU has no device in it")
    folder = checkpoint(setting, "qwen3-0.6b")
    work = even(256, 512, FIRST_STEP + STEPS + 64)

    async def traced(engine: AsyncEngine) -> None:
        await run_pass(engine, work)

    with TemporaryDirectory() as traces:
        asyncio.run(with_engine(config_for(setting, folder, profile=traces), traced))
        (file,) = Path(traces).glob("*.json.gz")
        with gzip.open(file) as trace:
            events = json.load(trace)["traceEvents"]
    return figures_of(kernel_intervals(events))


def kernel_intervals(events: Iterable[dict[str, Any]]) -> list[tuple[float, float]]:
    """Return start and end of every kernel of a Chrome trace, in microseconds, by start.

    Copies are left out.
    """
    return sorted((event["ts"], event["ts"] + event["dur"]) for event in events if event.get("cat") == "kernel")


def figures_of(kernels: list[tuple[float, float]]) -> dict[str, Any]:
    """Return the per cent of the traced time without a kernel: between steps, and in all gaps."""
    if not kernels:
        raise RuntimeError("there is no kernel in the trace")
    gaps, busy_until = [], kernels[0][0]
    for start, end in kernels:
        if start > busy_until:
            gaps.append(start - busy_until)
        busy_until = max(busy_until, end)
    whole = busy_until - kernels[0][0]
    return {
        "value": round(100 * sum(gap for gap in gaps if gap >= _BETWEEN_STEPS) / whole, 2),
        "all_gaps_per_cent": round(100 * sum(gaps) / whole, 2),
        "step_milliseconds": round(whole / STEPS / 1e3, 3),
        "kernels": len(kernels),
        "how": (
            f"torch.profiler (CUPTI) in the core over {STEPS} decode steps of 256 rows with contexts of about 600"
            " tokens: time from the first kernel's start to the last one's end in which no kernel ran (a copy is"
            f" none), in gaps of at least {_BETWEEN_STEPS:g} us (shorter ones lie inside a graph; all_gaps_per_cent has"
            " them too)"
        ),
    }
