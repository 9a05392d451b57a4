"""Rows that drive the whole engine as a worker does: `AsyncEngine` in this process, its core in one
of its own.

A pass is a workload submitted at once; its seconds run until the last token arrives in this
process. One-time work (loading and tuning kernels, capturing graphs) is done before the measured
pass by `warm_up`, and its duration is reported separately.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

from benchmarks.gpu.checkpoints import checkpoint, shape_of
from benchmarks.gpu.roofline import cost_of, roofline
from benchmarks.gpu.setting import NeedsGpu, Setting
from benchmarks.gpu.workload import Workload, drawn, even, staircase
from benchmarks.quantized_weights import KINDS
from workers.engine.client.async_engine import AsyncEngine
from workers.engine.messages.config import EngineConfig

_TINY_LIMIT = 150  # below the tiny models' vocabulary
_SPARE_STEPS = 3  # of each size, since requests admitted one after the other also end one after the other

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GpuPass:
    """One workload from its first request to its last token."""

    seconds: float
    output_tokens: int
    first_token_seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds


def qwen3_06b(setting: Setting) -> dict[str, Any]:
    """Measure nano-vllm's workload."""
    return _throughput(setting, "qwen3-0.6b", _benchmark(setting, 256, 100, 1024), full_warmup=True)


def qwen3_06b_fp8(setting: Setting) -> dict[str, Any]:
    """Measure nano-vllm's workload with keys and values in 8 bits."""
    if setting.device != "cuda":
        raise NeedsGpu("a CPU has no KV cache of 8 bits")
    work = _benchmark(setting, 256, 100, 1024)
    return _throughput(setting, "qwen3-0.6b", work, full_warmup=True, kv_cache_dtype="fp8")


def qwen3_06b_queued(setting: Setting) -> dict[str, Any]:
    """Measure four requests of nano-vllm's lengths for each of 256 slots.

    This is a worker's usual state: the next request starts when one ends.
    """
    work, slots = (_benchmark(setting, 0, 0, 0), 3) if setting.tiny else (drawn(1024, 100, 1024), 256)
    return _throughput(setting, "qwen3-0.6b", work, full_warmup=False, max_num_seqs=slots)


def qwen25_05b(setting: Setting) -> dict[str, Any]:
    """Measure nano-vllm's workload on a model so fast that the host is the bottleneck."""
    return _throughput(setting, "qwen2.5-0.5b", _benchmark(setting, 256, 100, 1024), full_warmup=True)


def qwen3_8b(setting: Setting) -> dict[str, Any]:
    """Measure 1,024 requests of half those lengths.

    All fit into the cache of an H200 at once, and the row into its time limit.
    """
    return _throughput(setting, "qwen3-8b", _benchmark(setting, 1024, 50, 512), full_warmup=False)


def qwen3_8b_int4(setting: Setting) -> dict[str, Any]:
    """Measure 64 requests of those lengths with 4-bit weights; steps mostly read weights."""
    return _throughput(setting, "qwen3-8b", _benchmark(setting, 64, 50, 512), full_warmup=False, kind="int4")


def qwen3_8b_float8(setting: Setting) -> dict[str, Any]:
    """Measure the same requests with float8 weights."""
    return _throughput(setting, "qwen3-8b", _benchmark(setting, 64, 50, 512), full_warmup=False, kind="float8")


def start_up(setting: Setting) -> dict[str, Any]:
    """Measure the time from the start of an engine to its first token in this process."""
    folder = checkpoint(setting, "qwen3-0.6b")

    async def measured() -> dict[str, Any]:
        began = time.perf_counter()
        engine = AsyncEngine(config_for(setting, folder))
        await engine.start()
        ready = time.perf_counter() - began
        try:
            one = await run_pass(engine, even(1, 5, 1, token_limit=_limit(setting)))
        finally:
            await engine.stop()
        return {
            "value": round(ready + one.first_token_seconds, 2),
            "ready_seconds": round(ready, 2),
            "weights_seconds": round(engine.info.weights_seconds, 2),
            "how": (
                "wall clock from starting the core's process (import of torch, CUDA, weights, profiling run) to the"
                " first token in this one; files in the page cache, kernels in Triton's and the tuner's caches on disk"
            ),
        }

    return asyncio.run(measured())


def config_for(setting: Setting, folder: str, **settings: Any) -> EngineConfig:
    """Return a worker's configuration for the model, with nano-vllm's context length."""
    if setting.tiny:
        return EngineConfig(model=folder, device="cpu", max_model_len=128, dtype="float32", threads=1, **settings)
    return EngineConfig(model=folder, device=setting.device, max_model_len=4096, dtype="bfloat16", **settings)


async def with_engine(config: EngineConfig, use: Callable[[AsyncEngine], Awaitable[T]]) -> T:
    """Start an engine, call `use` with it, and stop it in any case."""
    engine = AsyncEngine(config)
    await engine.start()
    try:
        return await use(engine)
    finally:
        await engine.stop()


async def run_pass(engine: AsyncEngine, work: Workload, first_id: int = 0) -> GpuPass:
    """Submit the whole workload and wait for its last token.

    Raises RuntimeError if a request failed.
    """
    requests = work.requests(first_id)
    began = time.perf_counter()
    engine.add(requests)
    unfinished, tokens, first = len(requests), 0, 0.0
    async for output in engine.steps():
        if output.errors:
            raise RuntimeError(next(iter(output.errors.values())))
        if not tokens:
            first = time.perf_counter() - began
        tokens += len(output.token_ids)
        unfinished -= sum(map(bool, output.finish))
        if not unfinished:
            break
    return GpuPass(time.perf_counter() - began, tokens, first)


async def warm_up(engine: AsyncEngine, setting: Setting, rows: int) -> float:
    """Run enough decode steps of all graph sizes up to `rows`; return the seconds."""
    from workers.engine.cuda.graphs import sizes, steps_to_record  # imports torch

    found = sizes(engine.info.max_num_seqs)
    enough = {found[-1]: 1, **{size: steps_to_record(size, larger) for size, larger in pairwise(found)}}
    steps = {size: 2 if setting.tiny else enough[size] + _SPARE_STEPS for size in found if size <= rows}
    stairs = staircase(steps, 4 if setting.tiny else 16, token_limit=_limit(setting))
    return (await run_pass(engine, stairs, first_id=1 << 20)).seconds


def _throughput(
    setting: Setting, name: str, work: Workload, full_warmup: bool, kind: str | None = None, **settings: Any
) -> dict[str, Any]:
    """Measure the throughput of a workload.

    `full_warmup`: run the whole workload once before, with other prompt tokens. `kind`: the kind
    of quantized weights. `settings` are the engine's.
    """
    folder = checkpoint(setting, name, kind)

    async def measured(engine: AsyncEngine) -> tuple[float, list[GpuPass]]:
        warm = await warm_up(engine, setting, len(work.prompts))
        passes = []
        if full_warmup:
            passes.append(await run_pass(engine, work.with_other_prompts(seed=2), first_id=1 << 21))
        before = engine.stats
        passes.append(await run_pass(engine, work))
        after = engine.stats
        figures.update(
            steps=after.steps - before.steps,
            preemptions=after.preemptions - before.preemptions,
            num_blocks=engine.info.num_blocks,
            dtype=engine.info.dtype,
            max_num_seqs=engine.info.max_num_seqs,
        )
        return warm, passes

    figures: dict[str, Any] = {}
    warm, passes = asyncio.run(with_engine(config_for(setting, folder, **settings), measured))
    last = passes[-1]
    assert last.output_tokens == work.output_tokens
    figures |= {
        "value": round(last.tokens_per_second, 1),
        "seconds": round(last.seconds, 3),
        "warm_up_seconds": round(warm, 2),
        "rehearsal_seconds": [round(one.seconds, 3) for one in passes[:-1]],
        "prompt_tokens": work.prompt_tokens,
        "output_tokens": last.output_tokens,
        "how": (
            f"{len(work.prompts)} requests handed to AsyncEngine at once, {work.prompt_tokens:,} prompt and"
            f" {last.output_tokens:,} output tokens, greedy, at most {figures['max_num_seqs']} at a time; wall clock"
            " from there to the last token in this process, after a warm-up that is not counted"
        ),
    }
    if setting.gpu is not None:
        kv_bytes = 1 if settings.get("kv_cache_dtype") == "fp8" else 2
        layer_bytes = 2 if kind is None else KINDS[kind].bytes_per_weight
        cost = cost_of(shape_of(setting, name), kv_bytes, layer_bytes)
        least = roofline(cost, work, setting.gpu)
        figures["bound"] = round(work.output_tokens / least.seconds, 1)
        figures["roofline"] = {
            "prompt_seconds": least.prompt_seconds,
            "decode_seconds": least.decode_seconds,
            "weight_bytes": least.weight_bytes,
            "kv_bytes": least.kv_bytes,
            "operations": least.operations,
        }
    return figures


def _benchmark(setting: Setting, requests: int, shortest: int, longest: int) -> Workload:
    return drawn(12, 2, 20, token_limit=_TINY_LIMIT) if setting.tiny else drawn(requests, shortest, longest)


def _limit(setting: Setting) -> int:
    return _TINY_LIMIT if setting.tiny else 10_000
