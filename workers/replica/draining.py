"""The end of a worker process's work: how requests in flight stop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from jobs.protocol.requests import RequestKey
from workers.engine.client.async_engine import AsyncEngine, EngineDeadError
from workers.replica.requeue import Requeue
from workers.replica.running import Running

logger = logging.getLogger(__name__)

MEASURE_SECONDS = 0.5
"""How long a draining worker measures, at least, before it decides which requests cannot finish in
time.
"""

MEASURE_STEPS = 2
"""How many steps it sees meanwhile, at least, unless the core's process is stopped."""

_LOOK_SECONDS = 0.02


async def drain(
    running: Running, engine: AsyncEngine, requeue: Requeue, steps: asyncio.Task[None], timeout: float
) -> None:
    """Requeue what has not started, then what cannot finish in time, then the rest after `timeout`
    seconds, each request from its checkpoint. Nothing is claimed any more.

    `steps` takes the core's steps. Raises EngineDeadError if the core crashes by itself meanwhile.
    """
    unstarted = running.drop_unstarted()
    await requeue.requeue(unstarted)
    if running.any():
        logger.info("draining: %d requests may run for up to %.0f s", len(running.keys()), timeout)
    time = asyncio.get_running_loop().time
    deadline = time() + timeout

    def goes_on() -> bool:
        return running.any() and not steps.done() and time() < deadline

    slow = await _find_slow(running, engine, goes_on, deadline)
    begun = await requeue.from_checkpoints(slow) if slow else 0
    while goes_on():
        await asyncio.sleep(_LOOK_SECONDS)
    if steps.done() and isinstance(death := steps.exception(), EngineDeadError) and death.by_itself:
        raise death
    begun += await requeue.from_checkpoints(running.keys())
    logger.info("stopped; requeued %d requests, %d of them partly generated", len(unstarted) + begun, begun)


async def _find_slow(
    running: Running, engine: AsyncEngine, goes_on: Callable[[], bool], deadline: float
) -> list[RequestKey]:
    """Measure the speed of requests; return those that would not end before the deadline."""
    time = asyncio.get_running_loop().time
    start, before, first_step = time(), running.tokens_left(), running.steps
    while goes_on():
        await asyncio.sleep(_LOOK_SECONDS)
        seconds = time() - start
        if seconds >= MEASURE_SECONDS and (running.steps >= first_step + MEASURE_STEPS or engine.is_stopped()):
            return hopeless(before, running.tokens_left(), (deadline - start - seconds) / seconds)
    return []


def hopeless(before: Mapping[RequestKey, int], left: Mapping[RequestKey, int], times: float) -> list[RequestKey]:
    """Return the batch requests that at their speed since `before` would need more than `times` as
    long again to use up the tokens that are `left`.

    One of them may still end before that by itself; it loses little by going on elsewhere, and a
    live call's client waits.
    """
    return [key for key, now in left.items() if not key.live and now > max(0, before.get(key, now) - now) * times]
