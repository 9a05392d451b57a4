"""`pipeline batches`: the batches of a server, over HTTP."""

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click

from jobs.protocol.priority import MOST_PRIORITY
from jobs.protocol.states import STATES
from pipeline.api_client import api_client, client_options, object_id, output_option, print_json, server_option, show
from pipeline.errors import Refused
from pipeline.options import Size, flag, fleet_redis_option, store_option

if TYPE_CHECKING:
    import openai
    from openai.types import Batch

save_option = flag(
    "-o", "--output-file", type=click.Path(path_type=Path, dir_okay=False), help="Save the answers there."
)
fail_option = flag("--fail-on-error", is_flag=True, help="Exit code 1 if a line's answer is an error.")
wait_option = flag("--wait", is_flag=True, help="Wait until it has ended; exit as `pipeline batches wait` does.")


@click.group()
def batches() -> None:
    """Create, fill, show, wait for, cancel, retry and delete batches of a server, over HTTP.

    `pipeline status`, `wait` and `tail` read a fleet's Redis instead, which also holds the batches
    of `run-batch` and of every tenant; so does `forget`.

    Exit codes: 0 done, 1 stopped unfinished (expired, cancelled, or the server is away), 2 refused,
    130 interrupted.
    """


def _pairs(_ctx: click.Context, _param: click.Parameter, pairs: tuple[str, ...]) -> dict[str, str]:
    if bad := next((pair for pair in pairs if "=" not in pair), None):
        raise click.BadParameter(f"{bad!r} is not KEY=VALUE")
    return dict(pair.split("=", 1) for pair in pairs)


endpoint_option = flag(
    "--endpoint",
    help="What the requests are for. [default: what the first line of a local file says, else /v1/chat/completions]",
)
window_option = flag(
    "--completion-window", default="24h", help="How long it may take; must be one that the server allows."
)
priority_option = flag(
    "--priority",
    type=click.IntRange(-MOST_PRIORITY, MOST_PRIORITY),
    default=0,
    help="Among the tenant's batches a lower one goes first.",
)
metadata_option = flag(
    "--metadata", multiple=True, callback=_pairs, metavar="KEY=VALUE", help="Noted with the batch; may be repeated."
)
expiry_option = flag(
    "--output-expires-after", type=click.IntRange(min=1), help="Seconds that the results are kept. [default: 30 days]"
)


def _check_wait(wait: bool, output_file: Path | None, fail_on_error: bool) -> None:
    if (output_file is not None or fail_on_error) and not wait:
        raise click.UsageError("--output-file and --fail-on-error need --wait: until then there are no answers")


def _show_or_wait(
    client: "openai.OpenAI",
    batch: "Batch",
    text: str,
    wait: bool,
    output_file: Path | None,
    fail_on_error: bool,
    as_json: bool,
    name: str | None = None,
) -> None:
    """Print the new state of a batch, or wait for its end and print that."""
    if not wait:
        show(batch, text, as_json)
        return
    from pipeline.remote_batches import see_to_the_end

    see_to_the_end(client, batch.id, output_file, fail_on_error, as_json, name)


@batches.command()
@click.argument("source", metavar="FILE_OR_ID")
@endpoint_option
@window_option
@priority_option
@metadata_option
@expiry_option
@wait_option
@save_option
@fail_option
@client_options
def submit(
    source: str,
    endpoint: str | None,
    completion_window: str,
    priority: int,
    metadata: dict[str, str],
    output_expires_after: int | None,
    wait: bool,
    output_file: Path | None,
    fail_on_error: bool,
    base_url: str,
    as_json: bool,
) -> None:
    """Upload a local file, or take the id of an uploaded one, create a batch and print its id."""
    from pipeline import remote_batches

    _check_wait(wait, output_file, fail_on_error)
    new = remote_batches.NewRemoteBatch(
        source=source,
        endpoint=endpoint,
        completion_window=completion_window,
        priority=priority,
        metadata=metadata,
        output_expires_after=output_expires_after,
    )
    with api_client(base_url) as client:
        batch = remote_batches.submit(client, new)
        if wait:
            click.echo(f"{batch.id} is made", err=True)
        name = None if new.path is None else str(new.path)
        _show_or_wait(client, batch, batch.id, wait, output_file, fail_on_error, as_json, name)


@batches.command("open")
@endpoint_option
@window_option
@priority_option
@metadata_option
@expiry_option
@client_options
def open_(
    endpoint: str | None,
    completion_window: str,
    priority: int,
    metadata: dict[str, str],
    output_expires_after: int | None,
    base_url: str,
    as_json: bool,
) -> None:
    """Create an open batch, whose requests are appended, and print its id."""
    from pipeline import remote_batches

    new = remote_batches.NewRemoteBatch(
        source="",
        endpoint=endpoint,
        completion_window=completion_window,
        priority=priority,
        metadata=metadata,
        output_expires_after=output_expires_after,
    )
    with api_client(base_url) as client:
        batch = remote_batches.open_batch(client, new)
    show(batch, batch.id, as_json)


@batches.command()
@object_id("batch_id", "BATCH_ID")
@click.argument("source", metavar="FILE", type=click.File("rb"), default="-")
@client_options
def append(batch_id: str, source: BinaryIO, base_url: str, as_json: bool) -> None:
    """Append the requests of a JSONL file to an open batch, by default those of stdin as they come.

    A request whose custom_id the batch has already changes nothing, so a command that was cut off
    may be repeated. Exit code 2 if a line is none of the batch.
    """
    from jobs.batch.manifest import LineProblem
    from pipeline import remote_batches
    from pipeline.summary import print_problems

    appended = repeated = failed = 0
    with api_client(base_url) as client:
        for answer, refused in remote_batches.append(client, batch_id, source):
            appended, repeated = appended + answer["appended"], repeated + answer["repeated"]
            failed += refused
            if as_json:
                print_json(answer)
            print_problems(source.name, [LineProblem(**error) for error in answer["errors"]])
    if not as_json:
        click.echo(f"{appended} appended, {repeated} repeated, {failed} refused")
    if failed:
        raise Refused(f"{failed} lines are no part of {batch_id}")


@batches.command()
@object_id("batch_id", "BATCH_ID")
@wait_option
@save_option
@fail_option
@client_options
def close(
    batch_id: str, wait: bool, output_file: Path | None, fail_on_error: bool, base_url: str, as_json: bool
) -> None:
    """Close an open batch: it ends once all of its requests have."""
    from pipeline import remote_batches

    _check_wait(wait, output_file, fail_on_error)
    with api_client(base_url) as client:
        batch = remote_batches.close(client, batch_id)
        _show_or_wait(client, batch, f"{batch.id} is closed", wait, output_file, fail_on_error, as_json)


@batches.command("list")
@flag("--status", multiple=True, type=click.Choice(list(STATES)), help="Only those with it; may be repeated.")
@flag("--limit", type=Size(), default=20, help="How many, the newest first.")
@client_options
def list_(status: tuple[str, ...], limit: int, base_url: str, as_json: bool) -> None:
    """Show batches, the newest first."""
    asked = {"status": ",".join(status)} if status else None
    with api_client(base_url) as client:
        found = list(islice(client.batches.list(limit=min(limit, 100), extra_query=asked), limit))
    if as_json:
        print_json([batch.to_dict() for batch in found])
        return
    from pipeline.remote_views import moment, shown_status
    from pipeline.tables import new_listing, print_table

    table = new_listing("id", "status", "total", "completed", "failed", "created", "endpoint")
    for batch in found:
        counts = batch.request_counts
        numbers = (
            ("", "", "") if counts is None else (f"{counts.total:,}", f"{counts.completed:,}", f"{counts.failed:,}")
        )
        table.add_row(batch.id, shown_status(batch), *numbers, moment(batch.created_at), batch.endpoint)
    print_table(table)


@batches.command()
@object_id("batch_id", "BATCH_ID")
@client_options
def get(batch_id: str, base_url: str, as_json: bool) -> None:
    """Show the progress of a batch, and the errors of one that was refused."""
    from pipeline.remote_views import show_object, shown_status
    from pipeline.summary import print_problems

    with api_client(base_url) as client:
        batch = client.batches.retrieve(batch_id)
    fields = batch.to_dict()
    show_object(fields if as_json else {**fields, "status": shown_status(batch)}, as_json)
    if not as_json:
        print_problems(batch.input_file_id, batch.errors and batch.errors.data)


@batches.command()
@object_id("batch_id", "BATCH_ID")
@save_option
@fail_option
@client_options
def wait(batch_id: str, output_file: Path | None, fail_on_error: bool, base_url: str, as_json: bool) -> None:
    """Wait for the end of a batch, with its progress on stderr.

    It tolerates a server that is away for less than a minute.
    """
    from pipeline import remote_batches

    with api_client(base_url) as client:
        remote_batches.see_to_the_end(client, batch_id, output_file, fail_on_error, as_json)


@batches.command()
@object_id("batch_ids", "BATCH_ID...", nargs=-1, required=True)
@client_options
def cancel(batch_ids: tuple[str, ...], base_url: str, as_json: bool) -> None:
    """Cancel batches. Finished lines stay, and the rest get error lines."""
    with api_client(base_url) as client:
        for batch_id in batch_ids:
            batch = client.batches.cancel(batch_id)
            show(batch, f"{batch.id} is {batch.status}", as_json)


@batches.command()
@object_id("batch_id", "BATCH_ID")
@wait_option
@save_option
@fail_option
@client_options
def retry(
    batch_id: str, wait: bool, output_file: Path | None, fail_on_error: bool, base_url: str, as_json: bool
) -> None:
    """Create a batch of the lines of an ended one that failed or never ran, and print its id."""
    from pipeline import remote_batches

    _check_wait(wait, output_file, fail_on_error)
    with api_client(base_url) as client:
        batch = remote_batches.retry(client, batch_id)
        if wait:
            click.echo(f"{batch.id} is made", err=True)
        _show_or_wait(client, batch, batch.id, wait, output_file, fail_on_error, as_json)


@batches.command()
@object_id("batch_ids", "BATCH_ID...", nargs=-1, required=True)
@client_options
def delete(batch_ids: tuple[str, ...], base_url: str, as_json: bool) -> None:
    """Delete batches that have ended. Their input and result files stay."""
    from pipeline import remote_batches

    with api_client(base_url) as client:
        for batch_id in batch_ids:
            gone = remote_batches.delete(client, batch_id)
            print_json(gone) if as_json else click.echo(f"{gone['id']} is deleted")


@batches.command()
@object_id("batch_id", "BATCH_ID")
@output_option
@flag("--errors", is_flag=True, help="The error lines in place of the answers.")
@server_option
def results(batch_id: str, output_file: Path | None, errors: bool, base_url: str) -> None:
    """Fetch the answers of a batch: of an ended one in input order, of a running one the finished
    lines in the order in which they finished.
    """
    from pipeline import remote_batches

    with api_client(base_url) as client:
        remote_batches.save_results(client, client.batches.retrieve(batch_id), output_file, errors)


@batches.command()
@object_id("batch_id", "BATCH_ID")
@client_options
def tail(batch_id: str, base_url: str, as_json: bool) -> None:
    """Show the text of a batch's answers as it is generated, until the batch has ended."""
    from pipeline.remote_tail import tail as follow

    with api_client(base_url) as client:
        follow(client, batch_id, as_json)


@batches.command()
@object_id("batch_ids", "BATCH_ID...", nargs=-1, required=True)
@flag("--yes", is_flag=True, help="Do not ask.")
@store_option
@fleet_redis_option
def forget(batch_ids: tuple[str, ...], yes: bool, file_store: str, redis_url: str) -> None:
    """Remove batches that have ended, or cannot: for operators, where `pipeline jobs` runs.

    Redis and the file store then know nothing of them but finished result files. One that runs well
    is refused: cancel it first.
    """
    from jobs.batch.forgetting import forget_batch
    from jobs.batch.retention import forget_output
    from jobs.queue.connection import check_server, connect
    from jobs.queue.request_queue import Queue
    from jobs.store.file_store import FileStore

    if not yes:
        click.confirm(f"Remove {', '.join(batch_ids)} for good?", abort=True, err=True)
    with connect(redis_url) as client:
        check_server(client)
        queue = Queue(client)
        files = FileStore(queue, file_store, forget_output)
        for batch_id in batch_ids:
            try:
                left = forget_batch(queue, files, batch_id)
            except KeyError:
                raise Refused(f"there is no batch {batch_id} in this Redis and in {file_store}") from None
            click.echo(f"{batch_id} is forgotten; {left}", err=True)
