"""What a worker's engine is said to do, whatever goes wrong in saying it."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

import pytest
import redis

from jobs.queue import keys
from jobs.queue.request_queue import Queue
from workers.engine.client.engine_metrics import EngineMetrics
from workers.engine.messages.core import Ready, Stats
from workers.replica import statistics
from workers.replica.metrics import RequestMetrics

READY = Ready(
    max_model_len=128,
    num_blocks=40,
    block_size=16,
    vocab_size=100,
    eos_token_ids=[],
    dtype="float32",
    device="cpu",
    max_num_seqs=8,
    max_num_batched_tokens=64,
    depth=0,
    threads=1,
    weights_seconds=0.0,
)


@dataclass
class FailingEngine:
    """One whose figures cannot be had at first."""

    failures: int
    stats: Stats = field(default_factory=Stats)
    metrics: EngineMetrics = field(default_factory=EngineMetrics)

    @property
    def info(self) -> Ready:
        self.failures -= 1
        if self.failures >= 0:
            raise RuntimeError("no figures")
        return READY


def test_what_fails_is_logged_once_and_tried_again(
    queue: Queue, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def until_logged() -> None:
        task = asyncio.create_task(statistics.report_gauges("w", FailingEngine(failures=3), RequestMetrics(), queue))
        async with asyncio.timeout(60):
            while not redis_client.exists(keys.gauges("w")):
                await asyncio.sleep(0.01)
        task.cancel()

    monkeypatch.setattr(statistics, "GAUGES_INTERVAL", 0.01)
    with caplog.at_level(logging.WARNING):
        asyncio.run(until_logged())
    assert queue.gauges(["w"])["w"].metrics
    assert [record.getMessage() for record in caplog.records] == ["failed to report engine metrics"]
