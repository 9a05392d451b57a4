"""One reading of a fleet, for `GET /metrics` and `pipeline top`."""

from typing import NamedTuple

from jobs.queue.gauges import Depths, WorkerGauges
from jobs.queue.registry import WorkerRecord
from jobs.queue.request_queue import Queue, TokenTotals, WebhookResult


class QueueReading(NamedTuple):
    """The workers, and the requests that wait and that ended, as Redis has them."""

    depths: Depths
    totals: TokenTotals
    requests_ended: int
    workers: list[WorkerRecord]
    reported: list[tuple[WorkerRecord, WorkerGauges]]  # the workers that reported lately
    webhook_attempts: dict[WebhookResult, int]


def read_fleet(queue: Queue) -> QueueReading:
    """Read the fleet in a few round trips, with on-demand models that no worker has registered.

    Raise `QueueUnavailable`.
    """
    workers, registered = queue.workers(), [record.name for record in queue.models()]
    models = list(dict.fromkeys([*registered, *queue.settings.on_demand_models]))
    gauges = queue.gauges([worker.id for worker in workers])
    reported = [(worker, gauges[worker.id]) for worker in workers if worker.id in gauges]
    return QueueReading(
        queue.depths(models),
        queue.token_totals(),
        queue.requests_ended(),
        workers,
        reported,
        queue.webhook_attempts(),
    )
