"""`pipeline serve`: everything on one machine, the counterpart of `vllm serve`."""

import contextlib

import click

from api.http_settings import HttpSettings
from api.settings import ApiSettings
from pipeline.commands.api import check_open
from pipeline.errors import Refused
from pipeline.hosting.settings import HostingSettings
from pipeline.options import (
    all_models,
    api_arguments,
    check_model_flags,
    common_options,
    flag,
    flags_of,
    log_settings,
    model_options,
    queue_options,
    redis_option,
    replicas_option,
    require_extra,
    served_models_options,
    served_store_option,
    values_of,
    webhook_options,
)

_PATIENCE_SECONDS = 5.0  # time for a stopping server to end


@click.command()
@click.argument("model", required=False)
@served_models_options
@flags_of(HostingSettings)
@flags_of(HttpSettings)
@flags_of(ApiSettings, "expected_models", "timeout_graceful_shutdown")
@flag(
    "--api-server-count",
    type=click.IntRange(min=1, max=64),
    default=1,
    help="API processes that share the address; for more calls than one processor core can carry.",
)
@served_store_option
@model_options
@replicas_option
@redis_option
@queue_options
@webhook_options
@common_options
@click.pass_context
def serve(
    ctx: click.Context,
    /,
    model: str | None,
    model_option: tuple[str, ...],
    model_flags: tuple[str, ...],
    file_store: str,
    redis_url: str | None,
    api_server_count: int,
    log_level: str,
    **_: object,
) -> None:
    """Serve models over HTTP: API, workers, batch control plane and, without REDIS_URL, a private
    Redis.

    Files and batches are kept in the file store, and resumed at the next start. Several models are
    loaded when work for them waits.
    """
    require_extra("worker", ctx)
    log_settings(ctx)
    check_model_flags(ctx)
    from api.http.listening import listening
    from pipeline.hosting.models import served_models
    from pipeline.run import print_line, run_until_stopped
    from pipeline.supervisor import Supervisor

    given = all_models(ctx, model, model_option)
    models = served_models(given, model_flags, redis_url, ctx.params)  # raises `Refused` before anything is started
    ctx.params["expected_model"] = tuple(name for one in models for name in one.listed_names)
    hosting = HostingSettings.from_environment(**values_of(HostingSettings, ctx.params))
    hosted = len(models) > 1 or hosting.idle_unload is not None
    if hosted or hosting.max_memory is not None:
        from pipeline.hosting.host import check_fits

        check_fits(models, hosting)
    settings = ApiSettings.from_environment(**values_of(ApiSettings, ctx.params))
    check_open(settings)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_alone(file_store, redis_url))
        try:
            listener = stack.enter_context(listening(settings))
        except OSError as error:
            raise Refused(error.strerror or str(error)) from None
        supervisor = stack.enter_context(Supervisor(redis_url, settings, print_line, log_level))
        if redis_url is not None:  # a private Redis knows no other store
            from jobs.store.owner import open_own_store
            from jobs.store.storage import path_of

            open_own_store(supervisor.queue, path_of(file_store))
        supervisor.start_api([*api_arguments(ctx.params), "--file-store", file_store], listener, api_server_count)
        if not hosted:
            alone = models[0]
            if hosting.max_memory is not None:
                from pipeline.hosting.host import sized_alone

                alone = sized_alone(alone, hosting)
            supervisor.start_workers(alone.arguments, alone.replicas)
        supervisor.start_jobs(file_store)
        host = None
        if hosted:
            from pipeline.hosting.host import ModelHost

            host = stack.enter_context(ModelHost(models, hosting, supervisor, print_line))
        run_until_stopped(supervisor, host)


def _alone(file_store: str, redis_url: str | None) -> contextlib.AbstractContextManager[None]:
    """Lock the file store against a second server with a Redis of its own."""
    from jobs.store.storage import is_local
    from pipeline.held_folder import held

    if redis_url is not None:
        return contextlib.nullcontext()
    if not is_local(file_store):
        raise Refused(
            f"the file store {file_store} is a bucket and cannot be locked: set REDIS_URL, to the Redis of all"
            " processes that use this bucket"
        )
    refusal = f"another `pipeline serve` uses the file store {file_store}: give each a --file-store of its own"
    return held(file_store, refusal, _PATIENCE_SECONDS)
