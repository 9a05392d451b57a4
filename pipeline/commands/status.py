"""`pipeline status`: workers, models and batches of a queue."""

import click

from pipeline.options import common_options, fleet_redis_option


@click.command()
@fleet_redis_option
@common_options
def status(redis_url: str, log_level: str) -> None:
    """Show workers with their states, models, the batches of all tenants that have not ended, and
    how many have ended.

    It reads the queue at REDIS_URL; over HTTP use `pipeline batches list`, which shows the key's
    own tenant.
    """
    from rich.console import Console

    from jobs.queue.connection import check_server, connect
    from jobs.queue.request_queue import Queue
    from pipeline.status_view import batches_tables, models_table, tokens_table, workers_table

    with connect(redis_url) as client:
        check_server(client)
        queue = Queue(client)
        console = Console()
        for table in (workers_table(queue), models_table(queue), *batches_tables(queue), tokens_table(queue)):
            console.print(table)
