"""Health of the processes of one host, according to Redis.

For probes: a fault is one sentence.
"""

from jobs.queue import keys
from jobs.queue.request_queue import Queue


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

    Progress requires a live driver there and a leading ticker on any host. RQ's own set of workers
    does not count: RQ writes to it only as a worker starts.
    """
    if not queue.redis.exists(keys.driver_host(host)):
        return f"no process on {host} takes batches"
    return None if queue.redis.exists(keys.LEADER) else "no ticker leads"
