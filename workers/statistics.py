"""One line of statistics every ten seconds while there is work."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from workers.engine.messages import Stats
from workers.running import Running

logger = logging.getLogger(__name__)

INTERVAL = 10.0


class HasStats(Protocol):
    """What this needs of an engine."""

    stats: Stats


async def report(running: Running, engine: HasStats, num_blocks: int) -> None:
    """Logs until cancelled; says nothing about an interval without work."""
    loop = asyncio.get_running_loop()
    before, finished, since = Stats(), running.finished, loop.time()
    while True:
        await asyncio.sleep(INTERVAL)
        now, seconds = engine.stats, loop.time() - since
        if now.steps != before.steps:
            logger.info("%s", describe(before, now, seconds, running.finished - finished, len(running), num_blocks))
        before, finished, since = now, running.finished, loop.time()


def describe(before: Stats, now: Stats, seconds: float, finished: int, in_flight: int, num_blocks: int) -> str:
    """What happened between two moments, in one line."""
    computed, hits = now.computed_tokens - before.computed_tokens, now.prefix_hit_tokens - before.prefix_hit_tokens
    return (
        f"generated {(now.tokens - before.tokens) / seconds:.0f} tokens/s, computed {computed / seconds:.0f} tokens/s, "
        f"finished {finished / seconds:.1f} requests/s; {in_flight} in flight, {now.running} running, {now.waiting} waiting; "
        f"cache {1 - now.free_blocks / max(1, num_blocks):.0%} full, {hits / max(1, hits + computed):.0%} of the tokens were in it, "
        f"{now.preemptions - before.preemptions} preemptions"
    )
