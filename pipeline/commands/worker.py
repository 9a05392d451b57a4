"""`pipeline worker`: one model replica, or several."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

import click

from jobs.process import drop_lost_exits
from pipeline.errors import Refused
from pipeline.options import (
    check_model_flags,
    common_options,
    flag,
    fleet_redis_option,
    log_settings,
    model_arguments,
    model_options,
    one_model,
    queue_options,
    replicas_option,
    require_extra,
    shutdown_option,
)

if TYPE_CHECKING:
    from workers.engine.client.launch import LaunchedCore
    from workers.engine.messages.config import EngineConfig

_BESIDES = 10.0  # seconds to stop, in addition to the shutdown timeout


@click.command()
@click.argument("model", required=False)
@flag(
    "--model", "model_option", env="PIPELINE_MODEL", help="Folder or hub name of the model. [default: the demo model]"
)
@shutdown_option
@model_options
@replicas_option
@fleet_redis_option
@queue_options
@common_options
@click.pass_context
def worker(
    ctx: click.Context,
    /,
    model: str | None,
    model_option: str | None,
    data_parallel_size: int,
    redis_url: str,
    log_level: str,
    **_: object,
) -> None:
    """Answer the requests of a queue with one model.

    A replica is a worker process and an engine core process on the device. With
    --data-parallel-size N this process starts N replicas, and restarts those that end.
    """
    require_extra("worker", ctx)
    log_settings(ctx)
    check_model_flags(ctx)
    name = one_model(ctx, model, model_option)
    _check_folder(ctx, name, redis_url)
    if data_parallel_size > 1:
        _supervise(ctx, name, redis_url, data_parallel_size, log_level)
        return
    from pipeline.worker_settings import unchecked_settings

    settings = unchecked_settings(name, redis_url, ctx.params)
    with (
        _sigterm_as_exit() as early_stop,
        _launched(settings.engine) as core,
    ):  # started first, since it takes longest to be ready
        from jobs.queue.connection import check_server, connect
        from workers.worker import main

        with connect(redis_url) as client:
            check_server(client)
        raise SystemExit(main(settings, core, lambda: early_stop.ordered))


def _check_folder(ctx: click.Context, model: str | None, redis_url: str) -> None:
    """Raise `Refused` for a folder whose model cannot be run; clients get the reason."""
    from pipeline.worker_settings import check_model_config, check_model_folder, unchecked_settings

    try:
        check_model_folder(model)
        check_model_config(model, ctx.params)
    except Refused as error:
        from workers.load_failure import note_load_failure

        note_load_failure(unchecked_settings(model, redis_url, ctx.params), error.message)
        raise


@contextlib.contextmanager
def _launched(config: "EngineConfig") -> Iterator["LaunchedCore"]:
    """Launch a core, and discard it at the end if no engine took it.

    Raises `Refused`.
    """
    from workers.engine.client.launch import launch_core

    try:
        core = launch_core(config)
    except OSError as error:
        raise Refused(f"the engine core cannot be started: {error}") from None
    try:
        yield core
    finally:
        core.discard()


class _EarlyStop:
    """Ends the process gracefully at a signal, and records the signal.

    The record is needed because an exception raised in a destructor is lost.
    """

    ordered = False

    def end(self, number: int, _frame: FrameType | None) -> None:
        self.ordered = True
        raise SystemExit(128 + number)


@contextlib.contextmanager
def _sigterm_as_exit() -> Iterator[_EarlyStop]:
    """End the process gracefully at SIGTERM, until another handler is set."""
    early_stop = _EarlyStop()
    drop_lost_exits()  # `ordered` records the signal
    before = signal.signal(signal.SIGTERM, early_stop.end)
    try:
        yield early_stop
    finally:
        signal.signal(signal.SIGTERM, before)


def _supervise(ctx: click.Context, model: str | None, redis_url: str, replicas: int, log_level: str) -> None:
    from pipeline.run import print_line, run_until_stopped
    from pipeline.supervisor import Supervisor
    from pipeline.worker_settings import unchecked_settings

    settings = unchecked_settings(model, redis_url, ctx.params)  # raises `Refused` before anything is started
    arguments = [*([model] if model else []), *model_arguments(ctx.params)]
    with Supervisor(
        redis_url, settings, print_line, log_level, stop_seconds=settings.shutdown_timeout + _BESIDES
    ) as supervisor:
        supervisor.start_workers(arguments, replicas)
        run_until_stopped(supervisor)
