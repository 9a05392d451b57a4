"""`pipeline keys`: who may call the API.

It works on the file store alone; servers notice a change within about a second.
"""

import json
import time
from typing import TYPE_CHECKING, Any

import click

from jobs.protocol.priority import LEAST_WEIGHT, MOST_WEIGHT
from pipeline.errors import Refused
from pipeline.options import Size, flag, json_option, store_option

if TYPE_CHECKING:
    from jobs.queue.request_queue import KeyUsage


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
        click.echo(json.dumps({**_shown(record, {}), "secret": secret}))
        return
    click.echo(f"{record.id} for tenant {tenant}, kept in {file_store}; this is its secret, shown once:", err=True)
    click.echo(secret)


@keys.command("list")
@flag(
    "--all",
    "with_revoked",
    env="PIPELINE_KEY_ALL",
    is_flag=True,
    help="Also keys that were revoked: their ids, and what was computed for them.",
)
@store_option
@json_option
def list_(with_revoked: bool, file_store: str, as_json: bool) -> None:
    """Show every key that is not revoked, without its secret, and what was computed for it.

    Tokens and seconds of devices are those of its batches and live calls, up to some seconds ago.
    """
    from jobs.store.api_keys import list_keys

    records, usage = list_keys(file_store), _usage(file_store)
    revoked = sorted((usage or {}).keys() - {record.id for record in records}) if with_revoked else []
    if as_json:
        shown = [_shown(record, usage) for record in records]
        click.echo(json.dumps(shown + [{"id": key_id, "usage": _usage_of(key_id, usage)} for key_id in revoked]))
        return
    if not records and not revoked:
        click.echo(f"there is no key in {file_store}", err=True)
        return
    from pipeline.tables import new_listing, print_table

    limited = ("requests/min", "queued tokens", "open batches", "weight")
    rows = new_listing("id", "tenant", "name", "created", *limited, "input tokens", "output tokens", "device seconds")
    for record in records:
        created = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.created_at))
        limits = (record.requests_per_minute, record.queued_tokens, record.open_batches)
        numbers = ["" if limit is None else f"{limit:,}" for limit in limits]
        weight = "" if record.weight is None else f"{record.weight:g}"
        spent = _usage_cells(record.id, usage)
        rows.add_row(record.id, record.tenant, record.name, created, *numbers, weight, *spent)
    for key_id in revoked:
        rows.add_row(key_id, "", "", "revoked", *[""] * len(limited), *_usage_cells(key_id, usage))
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


def _usage(file_store: str) -> "KeyUsage | None":
    """Return the usage of all keys, or None, with a warning, if it cannot be read."""
    from jobs.store.key_usage import load_usage
    from jobs.store.storage import StoreError
    from jobs.store.store_folder import store_root

    root = store_root(file_store)
    try:
        return load_usage(root)
    except StoreError as error:
        click.echo(f"Warning: the usage of the keys is unknown: {error}", err=True)
        return None


def _usage_of(key_id: str, usage: "KeyUsage | None") -> dict[str, Any] | None:
    from jobs.store.key_usage import usage_object

    return None if usage is None else usage_object(usage.get(key_id, {}))


def _usage_cells(key_id: str, usage: "KeyUsage | None") -> list[str]:
    counts = _usage_of(key_id, usage)
    return ["unknown"] * 3 if counts is None else [f"{value:,}" for value in counts.values()]


def _shown(record: Any, usage: "KeyUsage | None") -> dict[str, Any]:
    import msgspec

    shown = {name: value for name, value in msgspec.to_builtins(record).items() if name != "sha256"}
    return {**shown, "usage": _usage_of(record.id, usage)}
