"""API objects as readable text."""

import json
import time
from typing import TYPE_CHECKING, Any

import click

from jobs.protocol.unknown_members import UnknownMember, described
from pipeline.progress import Counts, duration
from pipeline.summary import requests_line, tokens_line

if TYPE_CHECKING:
    from openai.types import Batch


def moment(seconds: int | None) -> str:
    """Return the time in this machine's time zone; "" for None."""
    return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def show_object(value: dict[str, Any], as_json: bool) -> None:
    """Print an object on stdout: as JSON, or one line for each field that has a value."""
    if as_json:
        click.echo(json.dumps(value))
        return
    fields = {
        name: field for name, field in value.items() if field not in (None, {}) and name not in ("object", "errors")
    }
    width = max(map(len, fields), default=0)
    for name, field in fields.items():
        shown = f"{moment(field)} ({field})" if name.endswith("_at") else _plain(field)
        click.echo(f"{name:<{width}}  {shown}")


def shown_status(batch: "Batch") -> str:
    """Return the status; for an open batch also the time since requests were last appended."""
    fields: dict[str, Any] = batch.to_dict()
    if not fields.get("open"):
        return batch.status
    last = fields.get("last_append_at")
    since = "no append yet" if last is None else f"last append {duration(max(0, time.time() - last))} ago"
    return f"{batch.status} (open, {since})"


def counts_of(batch: "Batch") -> Counts:
    """Return the counts that progress shows; the API does not report running requests."""
    counts = batch.request_counts
    note = batch.status if batch.status != "in_progress" else ""
    if counts is None:
        return Counts(note=note)
    tokens = batch.usage.output_tokens if batch.usage is not None else 0
    return Counts(
        total=counts.total,
        done=counts.completed + counts.failed,
        failed=counts.failed,
        running=None,
        tokens=tokens,
        note=note,
    )


def describe(batch: "Batch") -> str:
    """Return an ended batch in one line."""
    parts = [f"{batch.id} is {batch.status}"]
    if batch.request_counts is not None:
        parts.append(requests_line(batch.request_counts.total, batch.request_counts.failed))
    if batch.usage is not None and batch.usage.total_tokens:
        usage = batch.usage
        parts.append(tokens_line(usage.input_tokens, usage.input_tokens_details.cached_tokens, usage.output_tokens))
    files = [
        f"{name} {file_id}"
        for name, file_id in (("output", batch.output_file_id), ("errors", batch.error_file_id))
        if file_id
    ]
    return "; ".join([*parts, *_unknown_members(batch.to_dict()), *files])


def _unknown_members(batch: dict[str, Any]) -> list[str]:
    """Return a note on the ignored members of the lines' bodies, if there are any."""
    found = [UnknownMember(one["name"], one["lines"], one["nearest"]) for one in batch.get("unknown_members", [])]
    return [f"unknown members, ignored: {described(found)}"] if found else []


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return "; ".join(map(_plain, value))
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(field)}" for name, field in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)
