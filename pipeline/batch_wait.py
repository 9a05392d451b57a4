"""Wait for a batch that was submitted earlier."""

import contextlib
import os
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import redis

from jobs.batch.client import BatchRecord, get_batch
from jobs.queue.connection import check_server, connect
from jobs.queue.scripts import QueueUnavailable
from jobs.queue.settings import QueueSettings
from jobs.store.storage import AtomicWriter, local_path, open_input
from pipeline.errors import Refused
from pipeline.progress import Counts
from pipeline.summary import check_end, counts_of, print_problems, print_summary
from pipeline.waiting import wait_until_ended


def wait_for_batch(batch_id: str, output: Path | None, redis_url: str, fail_on_error: bool) -> None:
    """Show progress until the batch has ended, and copy its results if asked to.

    Raises `Refused`, `Unfinished` and `Interrupted`.
    """
    QueueSettings.from_environment()  # refuses unusable settings, as all commands do
    began, is_known = time.monotonic(), False
    with connect(redis_url) as client:
        check_server(client)

        def read() -> tuple[BatchRecord, Counts, bool]:
            nonlocal is_known
            try:
                record = get_batch(client, batch_id, retry_seconds=0.0)
            except KeyError:
                if is_known:  # the control plane restores it in an empty Redis
                    raise QueueUnavailable(f"{batch_id} is gone from the queue") from None
                raise Refused(f"there is no batch {batch_id} in the queue") from None
            is_known = True
            return record, counts_of(record), record.ended

        come_back = f"{batch_id} goes on; come back with `pipeline wait {batch_id}`."
        record = wait_until_ended(read, come_back, lambda error: isinstance(error, QueueUnavailable | redis.RedisError))
    if record.state == "failed":
        print_problems(record.spec.input, record.errors)
    else:
        if output is not None and record.output is not None:
            copy_results(record.output, output)
        print_summary(record, time.monotonic() - began, copied_to=output)
    check_end(batch_id, record.state, record.total, record.failed, fail_on_error)


def copy_results(source: str, target: Path) -> None:
    """Copy a result file out of the file store."""
    path = local_path(source)
    if path is not None and target.exists() and path.samefile(target):
        return
    with open_input(source) as reader, _writing(target) as writer:
        shutil.copyfileobj(reader, writer)


@contextlib.contextmanager
def _writing(target: Path) -> Iterator[Any]:
    """Open a file for writing; a regular file appears when all of it is on disk."""
    mode = target.stat().st_mode if target.exists() else None
    if os.path.lexists(target) and not _may_be_replaced(target):
        with target.open("wb") as file:
            yield file
        return
    with AtomicWriter(str(target)) as writer:
        yield writer
        writer.commit()
    if mode is not None:
        target.chmod(stat.S_IMODE(mode))


def _may_be_replaced(target: Path) -> bool:
    """Return whether the target is a regular file, not a link, in a writable folder."""
    return target.is_file() and not target.is_symlink() and os.access(target.parent, os.W_OK)
