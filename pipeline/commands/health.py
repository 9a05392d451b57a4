"""`pipeline health`: a probe for a container's health check."""

from typing import Any

import click

from api.http_settings import HttpSettings
from pipeline.errors import Refused, Unfinished
from pipeline.options import all_of, common_options, flag_of, optional_redis_option, values_of

_WHERE = ("host", "port", "uds", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs")


@click.command()
@click.argument("process", type=click.Choice(["worker", "jobs", "api"]))
@optional_redis_option
@all_of(*(flag_of(HttpSettings, name, " Of `health api`.") for name in _WHERE))
@common_options
@click.pass_context
def health(ctx: click.Context, /, process: str, redis_url: str | None, **_: Any) -> None:
    """Exit with 0 if the workers, the control plane, or the API, of this host are healthy, else
    with 1 and a sentence.

    The API is asked for GET /health where it listens, by the same flags or variables.
    """
    if process == "api":
        from pipeline.api_probe import api_fault

        fault = api_fault(HttpSettings.from_environment(**values_of(HttpSettings, ctx.params)))
    else:
        fault = _fault_in_redis(process, redis_url)
    if fault is not None:
        raise Unfinished(fault)


def _fault_in_redis(process: str, redis_url: str | None) -> str | None:
    import socket

    from jobs.control.health import control_plane_fault, worker_fault
    from jobs.queue.connection import connect
    from jobs.queue.request_queue import Queue
    from jobs.queue.settings import QueueSettings

    if redis_url is None:
        raise Refused(f"`pipeline health {process}` needs the queue of a fleet: set REDIS_URL")
    host, impatient = socket.gethostname(), QueueSettings.from_environment(redis_retry_seconds=0)
    with connect(redis_url) as client:
        queue = Queue(client, impatient)
        return worker_fault(queue, host) if process == "worker" else control_plane_fault(queue, host)
