"""`pipeline health`: a probe for a container's health check."""

import click

from pipeline.errors import Unfinished
from pipeline.options import common_options, fleet_redis_option


@click.command()
@click.argument("process", type=click.Choice(["worker", "jobs"]))
@fleet_redis_option
@common_options
def health(process: str, redis_url: str, log_level: str) -> None:
    """Exit with 0 if the workers, or the control plane, of this host are healthy, else with 1 and a
    sentence.

    An API has GET /health.
    """
    import socket

    from jobs.control.health import control_plane_fault, worker_fault
    from jobs.queue.connection import connect
    from jobs.queue.request_queue import Queue
    from jobs.queue.settings import QueueSettings

    host, impatient = socket.gethostname(), QueueSettings.from_environment(redis_retry_seconds=0)
    with connect(redis_url) as client:
        queue = Queue(client, impatient)
        fault = worker_fault(queue, host) if process == "worker" else control_plane_fault(queue, host)
    if fault is not None:
        raise Unfinished(fault)
