"""Health of the processes of one host, according to Redis.

For probes: a fault is one sentence.
"""

from datetime import UTC, datetime

from rq import Worker

from jobs.queue import keys
from jobs.queue.request_queue import Queue
from jobs.queue.tasks import QUEUE

SILENT_SECONDS = 40.0
"""Our RQ workers send a heartbeat every 10 s, also when idle."""


def worker_fault(queue: Queue, host: str) -> str | None:
    """Return why no worker on `host` can answer a request; None when one can.

    A worker's record lasts as long as it renews its leases.
    """
    states = [record.state for record in queue.workers() if record.host == host]
    if "ready" in states:
        return None
    return f"no worker on {host} is ready: {', '.join(states) or 'none is registered'}"


def control_plane_fault(queue: Queue, host: str) -> str | None:
    """Return why batches make no progress on `host`, or None.

    Progress requires a live RQ worker there and a leading ticker on any host.
    """
    now = datetime.now(UTC)
    is_alive = any(
        worker.hostname == host
        and QUEUE in worker.queue_names()
        and worker.last_heartbeat
        and (now - worker.last_heartbeat).total_seconds() < SILENT_SECONDS
        for worker in Worker.all(queue.rq)
    )
    if not is_alive:
        return f"no process on {host} takes batches"
    return None if queue.redis.exists(keys.LEADER) else "no ticker leads"
