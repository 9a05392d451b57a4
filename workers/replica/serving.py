"""Run a worker process: claim, run and answer requests until ordered to stop."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from jobs.protocol.requests import Finished
from jobs.queue.request_queue import Queue
from workers.engine.client.async_engine import AsyncEngine, EngineDeadError
from workers.replica import statistics
from workers.replica.draining import drain
from workers.replica.intake import Intake
from workers.replica.outbox import Outbox
from workers.replica.prepared import Prepared
from workers.replica.quarantine import Quarantine
from workers.replica.registration import Registration
from workers.replica.requeue import Requeue
from workers.replica.running import Running
from workers.replica.stopping import wait_or_stop

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Serving:
    """A worker process with a ready core, and the objects that its tasks use."""

    queue: Queue
    registration: Registration
    engine: AsyncEngine
    running: Running
    outbox: Outbox
    requeue: Requeue
    intake: Intake
    quarantine: Quarantine
    longest_at_death: int = 0  # tokens of the longest request when the core crashed

    async def run(self, stopping: asyncio.Event, shutdown_timeout: float) -> None:
        """Serve until ordered to stop, then drain.

        After a crash of the core it requeues everything and raises EngineDeadError.
        """
        tasks = self._start_tasks()
        try:
            await wait_or_stop(stopping, *tasks)
            for task in tasks:
                if task.done():
                    task.result()
            await self.registration.set_state("draining")
            await self._stop_claiming()
            await drain(self.running, self.engine, self.requeue, tasks[0], shutdown_timeout)
        except EngineDeadError as error:
            await self._handle_crash(error)
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.intake.close()

    def _start_tasks(self) -> list[asyncio.Task[None]]:
        report = statistics.report(self.running, self.engine, self.engine.info.num_blocks)
        worker, metrics = self.registration.id, self.running.metrics
        gauges = statistics.report_gauges(worker, self.engine, metrics, self.queue)
        return [
            asyncio.create_task(self._take_steps(), name="steps"),
            asyncio.create_task(self.intake.run(self._start_requests), name="intake"),
            asyncio.create_task(self.quarantine.run(), name="quarantine"),
            asyncio.create_task(self.outbox.run(self.running.due, self.running.any), name="outbox"),
            asyncio.create_task(report, name="statistics"),
            asyncio.create_task(gauges, name="gauges"),
        ]

    async def _take_steps(self) -> None:
        async for output in self.engine.steps():
            self.running.on_step(output)
            if any(output.finish):
                self.intake.room_made()

    def _start_requests(self, prepared: list[Prepared], errors: list[Finished]) -> None:
        self.running.start(prepared)
        self.running.reject(errors)
        self.outbox.requests_run()
        if self.intake.isolated:
            self.quarantine.begin()

    async def _stop_claiming(self) -> None:
        await self.quarantine.close()
        await self.intake.pause()

    async def _handle_crash(self, error: EngineDeadError) -> None:
        """Publish the output of the dead core.

        Its requests continue from there on another core, once their leases are lost with the
        registration. If the core crashed by itself they are quarantined; requests that never
        reached it are requeued.
        """
        running, reached = self.running, self.running.keys_in_engine()
        logger.error("%s; requests in flight: %d", error, len(reached))
        await self._stop_claiming()
        await self.requeue.publish(running.checkpoint(running.keys()))
        if error.by_itself:
            self.longest_at_death = running.longest()
            running.suspect(reached)
            await self.requeue.quarantine(running.drop(reached), error)
            await self.requeue.requeue(running.drop(running.keys()))
