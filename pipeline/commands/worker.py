"""`pipeline worker`: one model replica."""

import click

from pipeline.errors import Refused
from pipeline.options import (
    check_model_flags,
    common_options,
    flag,
    log_settings,
    model_options,
    one_model,
    queue_options,
    redis_option,
)


@click.command()
@click.argument("model", required=False)
@flag("--model", "model_option", env="PIPELINE_MODEL", help="Folder or hub name of the model. [default: the demo model]")
@flag("--shutdown-timeout", type=click.FloatRange(min=0), default=10.0, help="Seconds that running requests get to end in after SIGTERM.")
@model_options
@redis_option
@queue_options
@common_options
@click.pass_context
def worker(ctx: click.Context, /, model: str | None, model_option: str | None, redis_url: str | None, log_level: str, **_: object) -> None:
    """Answers the requests of a queue with one model: a front process, and an engine core process on the device."""
    from pipeline.logs import configure_logs

    configure_logs("worker", log_level)
    log_settings(ctx)
    check_model_flags(ctx)
    if redis_url is None:
        raise Refused("`pipeline worker` needs the queue of a fleet: set REDIS_URL (or use `pipeline serve`, which brings its own)")
    from jobs.connection import check_server, connect
    from pipeline.worker_settings import worker_settings
    from workers.worker import main

    settings = worker_settings(one_model(ctx, model, model_option), redis_url, ctx.params)
    with connect(redis_url) as client:
        check_server(client)
    raise SystemExit(main(settings))
