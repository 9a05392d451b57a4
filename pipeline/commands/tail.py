"""`pipeline tail`: the tokens of a request or of a batch, as they come."""

import click

from pipeline.options import common_options, fleet_redis_option


@click.command()
@click.argument("target", metavar="REQUEST_OR_BATCH")
@fleet_redis_option
@common_options
def tail(target: str, redis_url: str, log_level: str) -> None:
    """Show the text of a running request (`batch_x/17`, `live_x`), or of all running requests of a
    batch (`batch_x`).

    It reads the queue at REDIS_URL; over HTTP use `pipeline batches tail`.
    """
    from pipeline.tailing import tail_target

    tail_target(target, redis_url)
