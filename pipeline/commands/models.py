"""`pipeline models`: the models that a fleet knows."""

from typing import TYPE_CHECKING

import click

from pipeline.errors import Refused
from pipeline.options import fleet_redis_option

if TYPE_CHECKING:
    from jobs.queue.request_queue import Queue


@click.group()
def models() -> None:
    """Show and forget the models that a fleet knows, served at the moment or not: for operators.

    A batch may name any of these. Exit codes: 0 done, 1 Redis is away, 2 refused, 130 interrupted.
    """


@models.command("list")
@fleet_redis_option
def list_(redis_url: str) -> None:
    """Show every model that is or was served."""
    from rich.console import Console

    from jobs.queue.connection import check_server, connect
    from jobs.queue.request_queue import Queue
    from pipeline.status_view import models_table

    with connect(redis_url) as client:
        check_server(client)
        Console().print(models_table(Queue(client)))


@models.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@fleet_redis_option
def forget(names: tuple[str, ...], redis_url: str) -> None:
    """Forget models that no worker serves and no open batch names.

    Batches for them are refused from then on, until a worker serves them again.
    """
    from jobs.queue.connection import check_server, connect
    from jobs.queue.request_queue import Queue

    with connect(redis_url) as client:
        check_server(client)
        for name in names:
            _forget(Queue(client), name)
            click.echo(f"{name} is forgotten", err=True)


def _forget(queue: "Queue", name: str) -> None:
    if name not in {model.name for model in queue.models()}:
        raise Refused(f"no model {name} is known in this Redis: `pipeline models list` shows the known models")
    if batches := [batch for batch, status in queue.active_batches().items() if name in status.line_models]:
        more = f" and {len(batches) - 1} more" if len(batches) > 1 else ""
        raise Refused(f"{batches[0]}{more} has lines for {name}: wait for its end, or cancel it first")
    if not queue.forget_model(name):
        raise Refused(f"a worker serves {name}: stop it first")
