"""`pipeline files`: the files of a server, over HTTP."""

from itertools import islice
from pathlib import Path
from typing import Any

import click

from pipeline.api_client import api_client, client_options, object_id, output_option, print_json, server_option, show
from pipeline.options import Size, flag


@click.group()
def files() -> None:
    """Upload, list, fetch and delete files of a server, over HTTP."""


@files.command()
@click.argument("path", metavar="FILE", type=click.Path(path_type=Path))
@flag("--purpose", default="batch", help="Purpose of the file; batch for the input of a batch.")
@flag(
    "--expires-after",
    type=click.IntRange(min=1),
    help="Seconds after which it is deleted. [default: 30 days for purpose batch, else never]",
)
@client_options
def upload(path: Path, purpose: str, expires_after: int | None, base_url: str, as_json: bool) -> None:
    """Upload FILE and print its id."""
    from pipeline import remote_files

    with api_client(base_url) as client:
        sent = remote_files.upload(client, path, purpose, expires_after)
    show(sent, sent.id, as_json)


@files.command("list")
@flag("--purpose", help="Only files of this purpose. [default: all]")
@flag("--limit", type=Size(), default=20, help="How many, the newest first.")
@client_options
def list_(purpose: str | None, limit: int, base_url: str, as_json: bool) -> None:
    """Show files, the newest first."""
    options: dict[str, Any] = {} if purpose is None else {"purpose": purpose}
    with api_client(base_url) as client:
        found = list(islice(client.files.list(limit=min(limit, 10_000), **options), limit))
    if as_json:
        print_json([file.to_dict() for file in found])
        return
    from pipeline.remote_views import moment
    from pipeline.tables import new_listing, print_table

    table = new_listing("id", "bytes", "purpose", "created", "expires", "name")
    for file in found:
        table.add_row(
            file.id, f"{file.bytes:,}", file.purpose, moment(file.created_at), moment(file.expires_at), file.filename
        )
    print_table(table)


@files.command()
@object_id("file_id", "FILE_ID")
@client_options
def get(file_id: str, base_url: str, as_json: bool) -> None:
    """Show a file's record."""
    from pipeline.remote_views import show_object

    with api_client(base_url) as client:
        show_object(client.files.retrieve(file_id).to_dict(), as_json)


@files.command()
@object_id("file_ids", "FILE_ID...", nargs=-1, required=True)
@client_options
def delete(file_ids: tuple[str, ...], base_url: str, as_json: bool) -> None:
    """Delete files. A batch that was created from one continues."""
    with api_client(base_url) as client:
        for file_id in file_ids:
            gone = client.files.delete(file_id)
            show(gone, f"{gone.id} is deleted", as_json)


@files.command()
@object_id("file_id", "FILE_ID")
@output_option
@server_option
def content(file_id: str, output_file: Path | None, base_url: str) -> None:
    """Write a file's content to stdout, or to -o FILE, which appears when all of it is on disk."""
    from pipeline import remote_files

    with api_client(base_url) as client:
        whole = remote_files.download(client, file_id, output_file)
    if not whole:
        click.echo(f"{file_id} is not complete yet: its batch has not ended", err=True)
