"""`pipeline top`: a fleet at work, as a terminal shows it."""

import math

import click

from pipeline.options import common_options, flag, fleet_redis_option


def _no_nan(_ctx: click.Context, _param: click.Parameter, seconds: float) -> float:
    if math.isnan(seconds):  # a range does not exclude NaN
        raise click.BadParameter("it is not a number")
    return seconds


@click.command()
@flag(
    "--interval",
    env="PIPELINE_TOP_INTERVAL",
    type=click.FloatRange(0.1, 3600),
    default=1.0,
    callback=_no_nan,
    help="Seconds between two frames; with --once, between the two readings that its rates come from.",
)
@flag(
    "--once",
    env="PIPELINE_TOP_ONCE",
    is_flag=True,
    help="Print one frame as plain text, as is also done where stdout is no terminal.",
)
@fleet_redis_option
@common_options
def top(interval: float, once: bool, redis_url: str, log_level: str) -> None:
    """Show the batches, queues and workers of a fleet, again every second; `q` or Ctrl-C ends it.

    It reads the queue at REDIS_URL. Batches at work come first, then those that ended last. While
    Redis does not answer, it says so, shows what it read last, and goes on when Redis returns.
    """
    from jobs.queue.connection import check_server, connect
    from jobs.queue.redis_url import without_secrets
    from jobs.queue.request_queue import Queue
    from jobs.queue.settings import QueueSettings
    from pipeline.top.screen import is_terminal, show_live, show_once

    with connect(redis_url) as client:
        check_server(client)
        queue = Queue(client, QueueSettings.from_environment(redis_retry_seconds=0))
        show = show_live if is_terminal() and not once else show_once
        show(queue, interval, without_secrets(redis_url))
