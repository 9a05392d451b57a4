"""Report engine statistics: a log line every ten seconds of work, and gauges in Redis every
five.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec
import redis

from jobs.queue.gauges import GpuGauges, MetricDescriptor, MetricSample, WorkerGauges
from jobs.queue.request_queue import Queue, QueueUnavailable
from workers.engine.client.async_engine import AsyncEngine
from workers.engine.client.engine_metrics import EngineMetrics
from workers.engine.messages.core import Stats
from workers.replica.gpus import gpu_gauges
from workers.replica.metrics import RequestMetrics
from workers.replica.running import Running

logger = logging.getLogger(__name__)

INTERVAL = 10.0
GAUGES_INTERVAL = 5.0


async def report(running: Running, engine: AsyncEngine, num_blocks: int) -> None:
    """Log statistics until cancelled; intervals without work are skipped."""
    loop = asyncio.get_running_loop()
    before, finished, since = Stats(), running.finished, loop.time()
    while True:
        await asyncio.sleep(INTERVAL)
        now, seconds = engine.stats, loop.time() - since
        if now.steps != before.steps:
            logger.info(
                "%s", describe(before, now, seconds, running.finished - finished, running.num_sequences, num_blocks)
            )
        before, finished, since = now, running.finished, loop.time()


def describe(before: Stats, now: Stats, seconds: float, finished: int, in_flight: int, num_blocks: int) -> str:
    """Return the log line for the interval between two samples."""
    computed, hits = now.computed_tokens - before.computed_tokens, now.prefix_hit_tokens - before.prefix_hit_tokens
    return (
        f"generated {(now.tokens - before.tokens) / seconds:.0f} tokens/s, computed {computed / seconds:.0f} tokens/s,"
        f" finished {finished / seconds:.1f} requests/s; worker process: {in_flight} sequences in"
        f" flight; engine: {now.running} running, {now.waiting} waiting, {now.preemptions - before.preemptions}"
        f" preempted; KV cache: {1 - now.free_blocks / max(1, num_blocks):.0%} full,"
        f" {hits / max(1, hits + computed):.0%} of the tokens found in it"
    )


def declared_metrics() -> list[MetricDescriptor]:
    """Return the descriptors of the values in `report_gauges`, in that order."""
    metrics = [*EngineMetrics().all(), *RequestMetrics().all()]
    return msgspec.convert(metrics, list[MetricDescriptor], from_attributes=True)


async def report_gauges(worker: str, engine: AsyncEngine, metrics: RequestMetrics, queue: Queue) -> None:
    """Publish gauges in Redis until cancelled.

    No failure ends the replica; the next report replaces a lost one.
    """
    loop = asyncio.get_running_loop()
    before, since, problem = engine.stats.tokens, loop.time(), ""
    while True:
        tokens, now = engine.stats.tokens, loop.time()
        rate = (tokens - before) / (now - since) if now > since else 0.0
        before, since = tokens, now
        try:
            gpus = await asyncio.to_thread(gpu_gauges, engine.info.gpus)
            gauges = _gauges(engine, metrics, round(rate, 1), gpus)
            await asyncio.to_thread(queue.report_gauges, worker, gauges)
        except (QueueUnavailable, redis.RedisError):
            pass  # already logged by intake and outbox
        except Exception as error:
            if repr(error) != problem:
                logger.warning("failed to report engine metrics", exc_info=True)
            problem = repr(error)
        await asyncio.sleep(GAUGES_INTERVAL)


def _gauges(engine: AsyncEngine, metrics: RequestMetrics, rate: float, gpus: list[GpuGauges]) -> WorkerGauges:
    stats, blocks = engine.stats, engine.info.num_blocks
    metrics.blocks.set(blocks)
    metrics.kv_cache_usage.set(1 - stats.free_blocks / max(1, blocks - 1))  # the null block is never free
    metrics.tokens_per_second.set(rate)
    samples = [metric.samples() for metric in (*engine.metrics.all(), *metrics.all())]
    values = msgspec.convert(samples, list[list[MetricSample]])
    return WorkerGauges(stats.running, stats.waiting, rate, gpus, values)
