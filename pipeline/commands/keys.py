"""`pipeline keys`: who may call the API.

It works on the file store alone; servers notice a change within about a second.
"""

import json
import time
from typing import Any

import click

from jobs.protocol.priority import LEAST_WEIGHT, MOST_WEIGHT
from pipeline.errors import Refused
from pipeline.options import Size, flag, json_option, store_option


@click.group()
def keys() -> None:
    """Make, show and revoke API keys; once one exists, every call needs one.

    They are kept in the file store, so run this where `pipeline api` runs, or on the file system
    that it uses.
    """


@keys.command()
@flag(
    "--tenant",
    env="PIPELINE_KEY_TENANT",
    default="default",
    help="Whose key it is; all keys of a tenant see the same files and batches, and no others.",
)
@flag("--name", env="PIPELINE_KEY_NAME", default="", help="What the key is for.")
@flag(
    "--requests-per-minute",
    env="PIPELINE_KEY_REQUESTS_PER_MINUTE",
    type=Size(),
    help="Most requests in a minute. [default: any number]",
)
@flag(
    "--queued-tokens",
    env="PIPELINE_KEY_QUEUED_TOKENS",
    type=Size(),
    help=(
        "Most tokens in the tenant's batches that have not ended; a batch that would exceed it fails."
        " [default: any number]"
    ),
)
@flag(
    "--open-batches",
    env="PIPELINE_KEY_OPEN_BATCHES",
    type=Size(),
    help="Most batches of the tenant that have not ended. [default: any number]",
)
@flag(
    "--weight",
    env="PIPELINE_KEY_WEIGHT",
    type=click.FloatRange(LEAST_WEIGHT, MOST_WEIGHT),
    help=(
        "The tenant's share of tokens where several wait, against that of a tenant with 1; its newest key that names"
        " one decides. [default: as before, or 1]"
    ),
)
@store_option
@json_option
def create(tenant: str, name: str, weight: float | None, file_store: str, as_json: bool, **limits: int | None) -> None:
    """Make a key and print its secret, which cannot be shown again."""
    from jobs.store.api_keys import create_key

    try:
        record, secret = create_key(file_store, tenant=tenant, name=name, weight=weight, **limits)
    except ValueError as error:
        raise Refused(str(error)) from None
    if as_json:
        click.echo(json.dumps({**_shown(record), "secret": secret}))
        return
    click.echo(f"{record.id} for tenant {tenant}, kept in {file_store}; this is its secret, shown once:", err=True)
    click.echo(secret)


@keys.command("list")
@store_option
@json_option
def list_(file_store: str, as_json: bool) -> None:
    """Show every key that is not revoked, without its secret."""
    from jobs.store.api_keys import list_keys

    records = list_keys(file_store)
    if as_json:
        click.echo(json.dumps([_shown(record) for record in records]))
        return
    if not records:
        click.echo(f"there is no key in {file_store}", err=True)
        return
    from pipeline.tables import new_listing, print_table

    rows = new_listing("id", "tenant", "name", "created", "requests/min", "queued tokens", "open batches", "weight")
    for record in records:
        created = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.created_at))
        limits = (record.requests_per_minute, record.queued_tokens, record.open_batches)
        numbers = ["" if limit is None else f"{limit:,}" for limit in limits]
        weight = "" if record.weight is None else f"{record.weight:g}"
        rows.add_row(record.id, record.tenant, record.name, created, *numbers, weight)
    print_table(rows)


@keys.command()
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@store_option
def revoke(ids: tuple[str, ...], file_store: str) -> None:
    """Revoke keys. Files and batches of their tenants stay."""
    from jobs.store.api_keys import list_keys, revoke_key

    for key_id in ids:
        try:
            revoke_key(file_store, key_id)
        except KeyError:
            raise Refused(f"there is no key {key_id} in {file_store}") from None
        click.echo(f"{key_id} is revoked", err=True)
    if not list_keys(file_store):
        click.echo("that was the last key: servers without --insecure refuse every call now", err=True)


def _shown(record: Any) -> dict[str, Any]:
    import msgspec

    return {name: value for name, value in msgspec.to_builtins(record).items() if name != "sha256"}
