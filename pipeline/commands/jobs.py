"""`pipeline jobs`: the batch control plane."""

import click

from pipeline.options import (
    common_options,
    control_options,
    fleet_redis_option,
    log_settings,
    on_demand_option,
    served_store_option,
    values_of,
    webhook_options,
)


@click.command()
@served_store_option
@fleet_redis_option
@control_options
@on_demand_option
@webhook_options
@common_options
@click.pass_context
def jobs(ctx: click.Context, /, file_store: str, redis_url: str, log_level: str, **_: object) -> None:
    """Validate, feed and finalize batches: RQ workers for two queues, and the ticker."""
    log_settings(ctx)
    from jobs.queue.settings import QueueSettings
    from jobs.store.owner import open_own_store
    from jobs.store.storage import path_of
    from pipeline.run import print_line, run_until_stopped
    from pipeline.supervisor import Supervisor

    settings = QueueSettings.from_environment(**values_of(QueueSettings, ctx.params))
    with Supervisor(redis_url, settings, print_line, log_level) as supervisor:
        open_own_store(supervisor.queue, path_of(file_store))
        supervisor.start_jobs(file_store)
        run_until_stopped(supervisor)
