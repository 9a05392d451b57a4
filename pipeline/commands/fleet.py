"""`pipeline fleet`: workers on the nodes of a Ray cluster, as many as the queue needs."""

import hashlib
import os
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import click

from jobs.process import FORMAT_VARIABLE
from jobs.settings import variable
from pipeline.errors import Refused, Unfinished
from pipeline.options import (
    all_models,
    check_model_flags,
    common_options,
    flag,
    flags_of,
    fleet_redis_option,
    log_settings,
    model_arguments,
    model_options,
    queue_options,
    require_extra,
    served_models_options,
    shutdown_option,
    values_of,
)
from pipeline.ray.settings import FleetSettings, resource_of

if TYPE_CHECKING:
    from jobs.queue.settings import QueueSettings
    from pipeline.hosting.models import ServedModel
    from pipeline.ray.spec import ModelSpec

_DRAIN_MARGIN_SECONDS = 40.0  # for the placement process, in addition to the workers' stop time
_WORKER_SETTINGS = (
    "redis_url",
    "lease_seconds",
    "stream_interval",
    "otlp_traces_endpoint",
    "redis_retry_seconds",
    "undrained_bytes",
    "worker_deaths",
    "stream_keep_seconds",
    "stream_keep_bytes",
)
"""The settings of the queue that a worker uses; all users of the Ray cluster can read them."""


@click.command()
@click.argument("model", required=False)
@flag("--ray-address", required=True, help="The Ray cluster: `auto` on one of its nodes, or HOST:PORT of its head.")
@served_models_options
@flags_of(FleetSettings)
@shutdown_option
@model_options
@fleet_redis_option
@queue_options
@common_options
@click.pass_context
def fleet(
    ctx: click.Context,
    /,
    model: str | None,
    ray_address: str,
    model_option: tuple[str, ...],
    model_flags: tuple[str, ...],
    redis_url: str,
    log_level: str,
    **_: object,
) -> None:
    """Place workers on the nodes of a Ray cluster, as many of each model as its requests need.

    The folder of a model is on every node. The queue stays Redis. A worker whose node dies starts
    on another one. SIGTERM stops the workers in order; after SIGKILL they go on, and the next start
    of the command takes them over. Of several such commands for one queue, one works and the others
    wait.
    """
    require_extra("ray", ctx)
    log_settings(ctx)
    check_model_flags(ctx)
    from jobs.queue.redis_url import address_of
    from jobs.queue.settings import QueueSettings
    from pipeline.hosting.models import served_models
    from pipeline.ray.spec import SPEC_VARIABLE, FleetSpec
    from pipeline.run import print_line, run_until_stopped
    from pipeline.supervisor import Supervisor

    values = {**ctx.params, "data_parallel_size": 1}
    models = served_models(
        all_models(ctx, model, model_option), model_flags, redis_url, values, flags_of(FleetSettings)
    )
    # One namespace for each queue, so that two fleets can share a cluster
    namespace = f"pipeline-{hashlib.sha1(address_of(redis_url).encode(), usedforsecurity=False).hexdigest()[:12]}"
    specs = [_spec(one, log_level) for one in models]
    spec = FleetSpec(ray_address, namespace, redis_url, log_level, specs)
    settings = QueueSettings.from_environment(**values_of(QueueSettings, ctx.params))
    stop_seconds = max(one.worker.stop_seconds for one in specs) + _DRAIN_MARGIN_SECONDS
    with Supervisor(redis_url, settings, print_line, log_level, stop_seconds=stop_seconds) as supervisor:
        # By default Ray tries 20 times, for minutes, before it reports a lost head
        placement = supervisor.start_placement({SPEC_VARIABLE: spec.packed(), "RAY_NUM_REDIS_GET_RETRIES": "1"})
        run_until_stopped(supervisor)
    if placement.stop_code != 0:
        raise Unfinished(
            placement.last_error
            or "the command ended before its workers had stopped: draining workers end by themselves, others go on"
        )


def _spec(model: "ServedModel", log_level: str) -> "ModelSpec":
    from jobs.version import version
    from pipeline.ray.spec import ModelSpec, WorkerSpec

    folder = [] if model.folder is None else [_on_every_node(model.folder)]
    fleet = FleetSettings(**values_of(FleetSettings, model.values))
    if fleet.min_workers > fleet.max_workers:
        raise Refused(f"--min-workers {fleet.min_workers} is above --max-workers {fleet.max_workers}")
    settings, engine = model.settings, model.settings.engine
    gpus = fleet.worker_gpus
    if gpus is None and engine.device != "auto":
        gpus = 0 if engine.device == "cpu" else engine.tensor_parallel_size
    given = {"served_model_name": model.names, "shutdown_timeout": None}
    worker = WorkerSpec(
        arguments=[*folder, *model_arguments({**model.values, **given})],
        environment=_environment(settings),
        version=version(),
        log_level=log_level,
        shutdown_timeout=settings.shutdown_timeout,
        cpus=fleet.worker_cpus,
        gpus=gpus,
        ranks=engine.tensor_parallel_size,
        resources=dict(map(resource_of, fleet.worker_resources)),
    )
    each = fleet.requests_per_worker or engine.max_num_seqs
    bounds = fleet.min_workers, fleet.max_workers, each, fleet.quiet_seconds
    return ModelSpec(model.title, model.names, worker, *bounds, model.settings.aliases)


def _environment(settings: "QueueSettings") -> dict[str, str]:
    allowed = {variable(one) for one in fields(settings) if one.name in _WORKER_SETTINGS}
    logs = {name: value for name, value in os.environ.items() if name == FORMAT_VARIABLE}
    return logs | {name: value for name, value in settings.environment().items() if name in allowed}


def _on_every_node(folder: str) -> str:
    """Return the absolute path of a local folder, for other nodes; a hub name unchanged."""
    return str(Path(folder).resolve()) if Path(folder).is_dir() else folder
