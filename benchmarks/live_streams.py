"""Live streams at a constant number at once against the engine alone, by turns on the same prompts
and numbers of tokens.
"""

import asyncio
import random
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

from benchmarks.driving import greedy, running_engine
from benchmarks.live_latencies import latencies
from benchmarks.live_load import LiveLoad, start_load, wait_for_load
from benchmarks.live_prompts import body, streamed
from benchmarks.models import model_folder
from benchmarks.report import by_turns
from benchmarks.servers import HOST, Server
from workers.engine.client.async_engine import AsyncEngine
from workers.engine.messages.core import EngineRequest

_PROMPT, _OUTPUT = 64, (64, 128)  # tokens


def measure(server: Server, concurrency: int, requests: int, turns: int, seed: int) -> dict[str, Any]:
    """Measure by turns; each turn has new prompts, since the server caches earlier ones."""
    served: list[LiveLoad] = []
    engine: list[float] = []
    cores = []
    for turn in range(turns):
        bodies = _bodies(server.model, requests, seed + turn)
        began, used = time.perf_counter(), server.cpu_seconds()
        calls = [{"at": 0, "body": streamed(one)} for one in bodies]
        served.append(wait_for_load(start_load(HOST, server.port, calls, concurrency)))
        cores.append((server.cpu_seconds() - used) / (time.perf_counter() - began))
        engine.append(asyncio.run(_engine_alone(server.model, bodies, concurrency)))
    return {
        "concurrency": concurrency,
        "output_tokens": [load.output_tokens for load in served],
        "seconds": [round(load.seconds, 2) for load in served],
        "engine_seconds": [round(seconds, 2) for seconds in engine],
        "output_tokens_per_second": _median_rate(served, [load.seconds for load in served]),
        "engine_output_tokens_per_second": _median_rate(served, engine),
        "server_cores": [round(value, 3) for value in cores],
        "load_generator_cores": [round(load.cpu_seconds / load.seconds, 3) for load in served],
        **latencies([call for load in served for call in load.calls]),
        **by_turns([load.seconds for load in served], engine),
    }


def _median_rate(served: list[LiveLoad], seconds: list[float]) -> float:
    """Return the median output tokens/s for `seconds` of runs that made the `served` tokens."""
    return round(median(load.output_tokens / one for load, one in zip(served, seconds, strict=True)), 1)


def _bodies(model: str, requests: int, seed: int) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    return [body(draw, model, _PROMPT, draw.randint(*_OUTPUT)) for _ in range(requests)]


async def _engine_alone(model: str, bodies: list[dict[str, Any]], concurrency: int) -> float:
    """Return seconds from the first request to the last token, with `concurrency` at once."""
    requests = _tokenized(model, bodies)
    async with running_engine(model) as engine:
        began = time.perf_counter()
        await _drive(engine, iter(requests), concurrency)
        return time.perf_counter() - began


async def _drive(engine: AsyncEngine, requests: Iterator[EngineRequest], concurrency: int) -> None:
    """Submit a request whenever one ends. Raise RuntimeError if one failed."""
    running = _submit(engine, requests, concurrency)
    async for output in engine.steps():
        if output.errors:
            raise RuntimeError(next(iter(output.errors.values())))
        ended = sum(map(bool, output.finish))
        running += _submit(engine, requests, ended) - ended
        if not running:
            return


def _submit(engine: AsyncEngine, requests: Iterator[EngineRequest], most: int) -> int:
    """Submit at most `most` requests; return the number of submitted ones."""
    submitted = [request for _, request in zip(range(most), requests, strict=False)]
    if submitted:
        engine.add(submitted)
    return len(submitted)


def _tokenized(model: str, bodies: list[dict[str, Any]]) -> list[EngineRequest]:
    from transformers import AutoTokenizer  # slow to import

    tokenizer = AutoTokenizer.from_pretrained(model_folder(model))
    tokens = tokenizer([one["prompt"] for one in bodies])["input_ids"]
    return [greedy(ids, one["max_tokens"], index) for index, (ids, one) in enumerate(zip(tokens, bodies, strict=True))]
