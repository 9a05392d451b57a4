"""Drain a worker process: stop its requests in flight."""

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
"""Shortest time for which a draining worker measures its speed before it selects the requests that
cannot finish in time.
"""

MEASURE_STEPS = 2
"""Fewest steps in that measurement, unless the core's process is stopped."""

_LOOK_SECONDS = 0.02


async def drain(
    running: Running, engine: AsyncEngine, requeue: Requeue, steps: asyncio.Task[None], timeout: float
) -> None:
    """Requeue requests in three groups, each from its checkpoint: those not started, then those
    that cannot finish in time, then the rest after `timeout` seconds.

    Intake must be paused. `steps` is the task that processes the core's steps. Raises
    EngineDeadError if the core crashes by itself meanwhile.
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
    """Measure the speed of each request; return the requests that would miss the deadline."""
    time = asyncio.get_running_loop().time
    start, before, first_step = time(), running.tokens_left(), running.steps
    while goes_on():
        await asyncio.sleep(_LOOK_SECONDS)
        seconds = time() - start
        if seconds >= MEASURE_SECONDS and (running.steps >= first_step + MEASURE_STEPS or engine.is_stopped()):
            return hopeless(before, running.tokens_left(), (deadline - start - seconds) / seconds)
    return []


def hopeless(before: Mapping[RequestKey, int], left: Mapping[RequestKey, int], times: float) -> list[RequestKey]:
    """Return the batch requests that cannot use up their tokens `left` in time.

    A request is hopeless if, at its speed since `before`, it needs more than `times` as long again.
    It may still end early by itself; it loses little by continuing on another worker. Live calls
    are never returned, since their clients wait.
    """
    return [key for key, now in left.items() if not key.live and now > max(0, before.get(key, now) - now) * times]
