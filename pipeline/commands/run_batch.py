"""`pipeline run-batch`: from a file of requests to a file of results."""

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.errors import Refused
from pipeline.hosting.settings import HostingSettings
from pipeline.input_names import Location, named_files
from pipeline.options import (
    MODEL_FLAGS,
    ModelNames,
    check_model_flags,
    common_options,
    flag,
    flags_of,
    given_as_flag,
    log_settings,
    model_flags_option,
    model_options,
    queue_options,
    redis_option,
    replicas_option,
    require_extra,
    values_of,
)
from pipeline.row_options import read_names, row_flags, row_options
from pipeline.uris.addresses import AllowedHosts, parse_allowed
from pipeline.uris.uri import PathOrUri, Uri

if TYPE_CHECKING:
    from jobs.batch.row_requests import RowOptions
    from pipeline.hosting.models import ServedModel

_STDIN = Path("-")
_OF_FILES = (
    *("detach", "retry_failed", "keep_parts", "partition_by", "allow_hosts"),
    *("prompt_column", "template", "id_column", "keep_columns"),
)


def _read_allowed(_ctx: click.Context, _param: click.Parameter, text: str | None) -> AllowedHosts:
    try:
        return parse_allowed(text or "")
    except ValueError as error:
        raise click.BadParameter(f"{error}.") from None


@click.command("run-batch")
@click.argument("inputs", metavar="[INPUT]...", nargs=-1, type=PathOrUri())
@flag(
    "-i",
    "--input-file",
    type=PathOrUri(),
    help="The file of requests: JSONL, Parquet or CSV; the same as INPUT.",
)
@flag(
    "-o",
    "--output-file",
    type=PathOrUri(),
    help="The file of results, or a URI to upload it to; of several inputs the folder. [default: INPUT with .results"
    " before its suffix]",
)
@flag(
    "--partition-by",
    callback=read_names,
    help="Columns of the results, separated by commas: they are written into the folder of --output-file, as Parquet"
    " files by the values of these.",
)
@flag(
    "--allow-hosts",
    callback=_read_allowed,
    help="Hosts and networks of http inputs that are not on the public internet, separated by commas, such as"
    " 'files.lan,10.0.0.0/8'.",
)
@flag(
    "--model",
    "models",
    env="PIPELINE_MODEL",
    type=ModelNames(),
    multiple=True,
    help="Folder or hub name of the model, NAME=FOLDER, or a folder of models; with REDIS_URL, the name of a served"
    " one. May be repeated; each line then names its model. [default: the demo model]",
)
@model_flags_option
@flags_of(HostingSettings, "idle_unload")
@flag(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    help="Seed for lines that set none; each line's seed is derived from it and the line's number.",
)
@row_flags
@flag(
    "--skip-invalid-requests",
    is_flag=True,
    help="Give each invalid line, such as one with an unknown model or url, an error line, and run the others."
    " [default: refuse the file]",
)
@flag(
    "--strict-parameters",
    is_flag=True,
    help="Refuse lines whose bodies have members that are no parameters. [default: count and name them]",
)
@flag(
    "--keep-parts",
    is_flag=True,
    help="Keep the folder OUTPUT.parts of a run that is complete. [default: keep it if a request failed]",
)
@flag("--ordered", is_flag=True, help="With - as INPUT: write the answers in the order of their lines.")
@flag("--retry-failed", is_flag=True, help="Run lines again whose answer was an error.")
@flag("--fail-on-error", is_flag=True, help="Exit code 1 if a line's answer is an error.")
@flag("--local-worker", is_flag=True, help="With REDIS_URL: start a worker on this machine too.")
@flag("--detach", is_flag=True, help="With REDIS_URL: submit the batch, print its id and exit; see `pipeline wait`.")
@model_options
@replicas_option
@redis_option
@queue_options
@common_options
@click.pass_context
def run_batch(
    ctx: click.Context,
    /,
    inputs: tuple[Location, ...],
    input_file: Location | None,
    output_file: Location | None,
    partition_by: tuple[str, ...],
    allow_hosts: AllowedHosts,
    models: tuple[str, ...],
    model_flags: tuple[str, ...],
    skip_invalid_requests: bool,
    strict_parameters: bool,
    keep_parts: bool,
    ordered: bool,
    retry_failed: bool,
    fail_on_error: bool,
    local_worker: bool,
    detach: bool,
    redis_url: str | None,
    log_level: str,
    **_: object,
) -> None:
    """Answer every line of INPUT, in OpenAI's batch format, and write the results in input order.

    Of the rows of Parquet and CSV files --prompt-column or --template makes requests.

    With the same INPUT and output it resumes where it was stopped.

    INPUT and output may be URIs: s3, gs, abfs, hdfs and stores of fsspec; INPUT also http, https.
    What was fetched, and results that will be uploaded, are in the folder OUTPUT.parts. That of an
    output in a store is in the present folder.

    With - as INPUT the lines of stdin run as they arrive, and answers go to stdout, or behind those
    in the output, as they finish.

    Several INPUTs, those of a pattern such as 'data/*.jsonl', or those in a folder, run one after
    the other on the same worker. A folder of Parquet files is one input.

    Exit codes: 0 every line has its answer (an error is one too), 1 stopped unfinished, 2 refused,
    130 interrupted.
    """
    starts_worker = redis_url is None or local_worker
    if starts_worker:
        require_extra("worker", ctx)
    if detach and (partition_by or isinstance(output_file, Uri)):
        raise Refused(f"--detach exits at once, but the results are to be written to {output_file}: leave out --detach")
    if partition_by and isinstance(output_file, Uri):
        output_file = output_file.without_slash()
    named = _inputs(ctx, inputs, input_file)
    is_piped = _check_piped(ctx, named, output_file, redis_url)
    files = [] if is_piped else named_files(named, output_file)
    rows = row_options(ctx)
    _check_partitions(partition_by, rows, output_file, len(files))
    check_model_flags(ctx)
    _check_fleet_flags(ctx, redis_url, local_worker, detach)
    from jobs.queue.settings import QueueSettings
    from pipeline.batch_start import run_tasks, submit
    from pipeline.batch_task import Task

    log_settings(ctx, logging.DEBUG)
    hosting = HostingSettings.from_environment(**values_of(HostingSettings, ctx.params))
    hosted = _hosted(ctx, models, model_flags, redis_url, hosting) if starts_worker else []
    if len(models) > 1 and not starts_worker:
        raise Refused("with REDIS_URL the fleet has the models, and each line names its own: give one --model at most")
    if len(files) > 1 and hosted:
        raise Refused("several inputs run on one model: give one --model by its folder or name, or one input")
    task = partial(
        Task,
        rows=rows,
        partition_by=partition_by,
        allowed=allow_hosts,
        model=models[0] if models else None,
        hosted=hosted,
        hosting=hosting,
        redis_url=redis_url,
        queue=QueueSettings.from_environment(**values_of(QueueSettings, ctx.params)),
        model_flags=ctx.params,
        starts_worker=starts_worker,
        skip_invalid_requests=skip_invalid_requests,
        strict_parameters=strict_parameters,
        keep_parts=keep_parts,
        retry_failed=retry_failed,
        fail_on_error=fail_on_error,
        log_level=log_level,
    )
    if is_piped:
        from pipeline.piped.start import run_pipe

        answers = output_file if isinstance(output_file, Path) and output_file != _STDIN else None
        run_pipe(task(source=_STDIN, output=answers or _STDIN), answers, ordered)
        return
    tasks = [task(source=source, output=output) for source, output in files]
    if not detach:
        run_tasks(tasks)
        return
    for one in tasks:
        click.echo(submit(one))


def _hosted(
    ctx: click.Context,
    given: tuple[str, ...],
    flags: tuple[str, ...],
    redis_url: str | None,
    settings: HostingSettings,
) -> "list[ServedModel]":
    """Return the models; none for one model given by folder or hub name, which needs no host."""
    if len(given) < 2 and not flags and not any("=" in one or Path(one).is_dir() for one in given):
        return []
    from pipeline.hosting.models import served_models

    models = served_models(given, flags, redis_url, ctx.params)
    if len(models) == 1 and not flags and given[0] == models[0].settings.engine.model:
        return []
    from pipeline.hosting.host import check_fits  # imports redis, so only if needed

    check_fits(models, settings)
    return models


def _inputs(ctx: click.Context, positional: tuple[Location, ...], option: Location | None) -> tuple[Location, ...]:
    if positional and given_as_flag(ctx, ["input_file"]) and positional != (option,):
        raise Refused(f"two inputs are named: {positional[0]} and --input-file {option}")
    named = positional or ((option,) if option is not None else ())
    if not named:
        raise click.UsageError("no input is named: pipeline run-batch INPUT [-o OUTPUT]", ctx)
    return named


def _check_partitions(
    columns: tuple[str, ...], rows: "RowOptions | None", output: Location | None, inputs: int
) -> None:
    from jobs.control.result_rows import RESULT_COLUMNS, kept_name

    known = [*RESULT_COLUMNS, *(kept_name(name) for name in (rows.keep_columns if rows else ()))]
    if unknown := [name for name in columns if name not in known]:
        raise Refused(f"--partition-by names no column of the results: {unknown[0]}; --keep-columns adds columns")
    if columns and (output is None or inputs > 1):
        raise Refused("--partition-by needs one input, and -o with the folder of its results")


def _check_piped(
    ctx: click.Context, inputs: tuple[Location, ...], output: Location | None, redis_url: str | None
) -> bool:
    """Return whether the lines come from stdin. Raise `Refused` for flags that do not fit."""
    if _STDIN not in inputs:
        if given_as_flag(ctx, ["ordered"]):
            raise Refused("--ordered is for lines of stdin, which INPUT - reads; results of a file are in its order")
        return False
    if len(inputs) > 1:
        raise Refused("- is stdin, and no other input can run beside it: give one of them")
    if unfit := given_as_flag(ctx, _OF_FILES):
        raise Refused(f"{unfit[0]} is for input files, and the input is stdin: leave it out")
    if isinstance(output, Uri):
        raise Refused(f"answers to lines of stdin cannot go to {output}: leave out -o for stdout, or name a local file")
    if redis_url is not None:
        raise Refused("lines of stdin run on this machine alone: unset REDIS_URL, or append them to an open batch")
    return True


def _check_fleet_flags(ctx: click.Context, redis_url: str | None, local_worker: bool, detach: bool) -> None:
    if redis_url is None and detach:
        raise Refused("--detach submits the batch to a fleet: set REDIS_URL")
    if detach and local_worker:
        raise Refused("--detach exits at once and --local-worker keeps running: give one of them")
    unused = given_as_flag(ctx, [*MODEL_FLAGS, "data_parallel_size"])
    if redis_url is not None and not local_worker and unused:
        raise Refused(
            f"{unused[0]} is for a worker that is started here, but with REDIS_URL the fleet answers: add"
            " --local-worker"
        )
