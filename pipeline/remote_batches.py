"""Batches of a server: creation from a local or an uploaded file, waiting, and results."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast
from urllib.parse import quote

import click

from batch_inference_pipeline.idempotency import new_header
from batch_inference_pipeline.passing import is_passing
from jobs.batch.input_files import InputError, first_line
from jobs.protocol.chat import CHAT
from jobs.protocol.lines import decode_json
from jobs.protocol.states import END_STATES
from jobs.store.storage import StoreError
from pipeline import remote_files
from pipeline.errors import Refused
from pipeline.progress import Counts
from pipeline.remote_views import counts_of, describe
from pipeline.summary import check_end, print_problems
from pipeline.waiting import wait_until_ended

if TYPE_CHECKING:
    import openai
    from openai.types import Batch

_APPEND_BYTES = 8 * 1024 * 1024  # size of one call


@dataclass(frozen=True, kw_only=True)
class NewRemoteBatch:
    """The parameters of a batch. `source` is a local file, or the id of an uploaded file."""

    source: str
    endpoint: str | None = None  # None: the endpoint of the file's first line
    completion_window: str = "24h"
    metadata: dict[str, str] = field(default_factory=dict)
    priority: int = 0
    output_expires_after: int | None = None  # seconds

    @property
    def path(self) -> Path | None:
        """The path of a local `source`, else None."""
        return None if self.source.startswith("file-") and not Path(self.source).exists() else Path(self.source)


def submit(client: "openai.OpenAI", new: NewRemoteBatch) -> "Batch":
    """Upload a local file, and create the batch.

    If the batch cannot be created, the uploaded file is deleted. Raises `Refused`.
    """
    if new.path is None:
        return _create(client, new, new.source, new.endpoint)
    endpoint = new.endpoint or endpoint_of(new.path)
    file_id = remote_files.upload(client, new.path).id
    try:
        batch = _create(client, new, file_id, endpoint)
    except BaseException:
        with contextlib.suppress(Exception):
            # A batch that was created nevertheless has a copy of the input
            client.with_options(max_retries=0).files.delete(file_id)
        raise
    click.echo(f"{new.path} is uploaded as {file_id}", err=True)
    return batch


def _create(client: "openai.OpenAI", new: NewRemoteBatch, file_id: str, endpoint: str | None) -> "Batch":
    extra = {"priority": new.priority} if new.priority else None
    return client.batches.create(input_file_id=file_id, extra_body=extra, **_wanted(new, endpoint))


def _wanted(new: NewRemoteBatch, endpoint: str | None) -> dict[str, Any]:
    options: dict[str, Any] = {"metadata": new.metadata} if new.metadata else {}
    if new.output_expires_after is not None:
        options["output_expires_after"] = {"anchor": "created_at", "seconds": new.output_expires_after}
    return {"endpoint": endpoint or CHAT, "completion_window": new.completion_window, **options}


def open_batch(client: "openai.OpenAI", new: NewRemoteBatch) -> "Batch":
    """Create an open batch; `source` is ignored."""
    from openai.types import Batch

    body = {"input": "stream", "priority": new.priority, **_wanted(new, new.endpoint)}
    return client.post("/batches", cast_to=Batch, body=body)


def append(client: "openai.OpenAI", batch_id: str, source: BinaryIO) -> Iterator[tuple[dict[str, Any], int]]:
    """Append the lines of a file, or of a pipe as they arrive, in groups.

    Yield the server's answer for each group, and how many of its lines were rejected; `errors` may
    list fewer. Line numbers count from the first line of all groups.
    """
    number = 0
    for content in _whole_lines(source):
        answer = cast(dict[str, Any], client.post(f"{_path(batch_id)}/requests", cast_to=object, content=content))
        errors = [{**error, "line": error["line"] and number + error["line"]} for error in answer["errors"]]
        number += content.count(b"\n")
        refused = sum(map(bool, map(bytes.strip, content.split(b"\n")))) - answer["appended"] - answer["repeated"]
        yield {**answer, "errors": errors}, refused


def _whole_lines(source: BinaryIO) -> Iterator[bytes]:
    """Yield the available data, up to the end of a line."""
    begun = b""
    while data := source.read1(_APPEND_BYTES):  # type: ignore[attr-defined]
        whole, line_feed, rest = data.rpartition(b"\n")
        if line_feed:
            yield begun + whole + line_feed
            begun = b""
        begun += rest
    if begun:
        yield begun


def close(client: "openai.OpenAI", batch_id: str) -> "Batch":
    """Close an open batch."""
    from openai.types import Batch

    return client.post(f"{_path(batch_id)}/close", cast_to=Batch)


def delete(client: "openai.OpenAI", batch_id: str) -> dict[str, Any]:
    """Delete an ended batch; the official client has no method for it."""
    return cast(dict[str, Any], client.delete(_path(batch_id), cast_to=object))


def retry(client: "openai.OpenAI", batch_id: str) -> "Batch":
    """Create a batch of the unanswered lines of an ended batch.

    The official client has no method for it. A repeated call creates only one batch.
    """
    from openai.types import Batch

    return client.post(f"{_path(batch_id)}/retry", cast_to=Batch, options={"headers": new_header()})


def _path(batch_id: str) -> str:
    return f"/batches/{quote(batch_id, safe='')}"


def endpoint_of(path: Path) -> str | None:
    """Return the endpoint of a file's first request, or None.

    Raises `Refused` for a file that cannot be read.
    """
    if not path.is_file():
        raise Refused(f"{path} is a folder" if path.is_dir() else f"there is no file {path}, and it is no file id")
    try:
        line = first_line(str(path))
    except (InputError, StoreError) as error:
        raise Refused(str(error)) from None
    with contextlib.suppress(ValueError):
        request = decode_json(line or b"")
        if isinstance(request, dict) and isinstance(request.get("url"), str):
            return str(request["url"])
    return None


def wait_for(client: "openai.OpenAI", batch_id: str) -> "Batch":
    """Show progress until the batch has ended, even if the server is unavailable for some seconds.

    Raises `Interrupted`.
    """
    patient = client.with_options(max_retries=0)

    def read() -> "tuple[Batch, Counts, bool]":
        batch = patient.batches.retrieve(batch_id)
        return batch, counts_of(batch), batch.status in END_STATES

    come_back = f"{batch_id} goes on; come back with `pipeline batches wait {batch_id}`."
    return wait_until_ended(read, come_back, is_passing, longest_pause=2.0)


def see_to_the_end(
    client: "openai.OpenAI",
    batch_id: str,
    output: Path | None,
    fail_on_error: bool,
    as_json: bool,
    source: str | None = None,
) -> None:
    """Wait, print how the batch ended, and save its answers if asked to.

    `source` is the input's name in messages. Raises `Refused`, `Unfinished` and `Interrupted`.
    """
    batch = wait_for(client, batch_id)
    if as_json:
        click.echo(json.dumps(batch.to_dict()))
    elif batch.status != "failed":
        click.echo(describe(batch))
    if output is not None and batch.output_file_id:
        save_results(client, batch, output)
    if batch.status == "failed":
        print_problems(source or batch.input_file_id, batch.errors and batch.errors.data)
    counts = batch.request_counts
    check_end(batch.id, batch.status, counts.total if counts else 0, counts.failed if counts else 0, fail_on_error)


def save_results(client: "openai.OpenAI", batch: "Batch", output: Path | None, errors: bool = False) -> None:
    """Write the batch's answers so far, or its error lines.

    Raises `Refused` if there are none.
    """
    file_id = batch.error_file_id if errors else batch.output_file_id
    if not file_id:
        raise Refused(_why_nothing(batch, errors))
    whole = remote_files.download(client, file_id, output)
    if not whole:
        click.echo(
            f"{batch.id} is {batch.status}: these are the answers so far, in the order in which they finished", err=True
        )
    if output is not None:
        click.echo(f"results: {output}", err=True)


def _why_nothing(batch: "Batch", errors: bool) -> str:
    if batch.status == "failed":
        return f"{batch.id} was refused, so it has no results; `pipeline batches wait {batch.id}` lists the problems"
    if batch.status not in END_STATES:
        kind = "errors are written when it has ended" if errors else "no request of it is answered yet"
        return f"{batch.id} is {batch.status}: {kind}"
    return (
        f"no request of {batch.id} failed" if errors else f"no request of {batch.id} was answered; see --errors for why"
    )
