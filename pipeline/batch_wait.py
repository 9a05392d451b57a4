"""Waiting for a batch that was submitted earlier."""

import shutil
import time
from pathlib import Path

from jobs.batch.client import BatchRecord, get_batch
from jobs.queue.connection import check_server, connect
from jobs.store.storage import local_path, open_input
from pipeline.errors import Interrupted, Refused, Unfinished
from pipeline.progress import Counts, make_progress
from pipeline.signals import Signals
from pipeline.summary import Summary, print_problems, print_summary

_POLL_SECONDS = 0.2


def wait_for_batch(batch_id: str, output: Path | None, redis_url: str, fail_on_error: bool) -> None:
    """Show progress until the batch has ended, and copy its results if asked to.

    Raises `Refused`, `Unfinished` and `Interrupted`.
    """
    began = time.monotonic()
    with connect(redis_url) as client, Signals() as signals, make_progress() as progress:
        check_server(client)
        while True:
            try:
                record = get_batch(client, batch_id)
            except KeyError:
                raise Refused(f"there is no batch {batch_id} in the queue") from None
            if record.ended:
                break
            if signals.stops:
                raise Interrupted(f"Interrupted: {batch_id} goes on; come back with `pipeline wait {batch_id}`.")
            progress.update(counts_of(record))
            signals.wait(_POLL_SECONDS)
    if record.state == "failed":
        print_problems(Path(record.spec.input), record.errors)
        raise Refused(f"{batch_id} was refused")
    if output is not None and record.output is not None:
        copy_results(record.output, output)
    print_summary(Summary(record=record, seconds=time.monotonic() - began, answering=0.0, output=output))
    if record.state != "completed":
        raise Unfinished(f"{batch_id} was {record.state} before it was finished")
    if record.failed and fail_on_error:
        raise Unfinished(f"{record.failed} of {record.total} requests failed")


def counts_of(record: BatchRecord, note: str = "") -> Counts:
    """Return the record as progress shows it."""
    return Counts(
        total=record.total, done=record.completed + record.failed, failed=record.failed, running=record.running,
        tokens=record.usage.completion_tokens, note=f"trying again: {record.problem}" if record.problem else note,
    )  # fmt: skip


def copy_results(source: str, target: Path) -> None:
    """Copy a result file out of the file store."""
    path = local_path(source)
    if path is not None and target.exists() and path.samefile(target):
        return
    with open_input(source) as reader, target.open("wb") as writer:
        shutil.copyfileobj(reader, writer)
