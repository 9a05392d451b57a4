"""The first steps of a run: check its input, start the worker, then run or submit the batch.

The worker starts before this process imports the modules for the batch itself, since loading the
model takes longest.
"""

import contextlib
import logging
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from jobs.batch.input_files import InputError, is_parquet
from jobs.batch.manifest import Manifest, load_manifest
from pipeline.batch_task import Task, own_settings, spec_of, start_worker
from pipeline.completed import find_completed, finish_removal, replace_folder
from pipeline.errors import CommandEnd, LinesFailed, Refused
from pipeline.held_folder import RUN_LOCK, empty_folder, held
from pipeline.progress import Progress, make_progress
from pipeline.row_options import check_rows
from pipeline.signals import Signals
from pipeline.summary import print_completed
from pipeline.supervisor import Supervisor
from pipeline.uris.fetching import holds_input_alone, is_fetched, open_source
from pipeline.uris.uri import Uri

_SMALL_BYTES = 4 * 1024 * 1024

log = logging.getLogger("run-batch")


def run_tasks(tasks: Sequence[Task]) -> None:
    """Run batches one after the other on the same workers, and print their summaries.

    If there are several, the others run even if one is refused or has failed lines.

    Raises `Refused`, `Unfinished` and `Interrupted`.
    """
    began = time.monotonic()
    asked = len(tasks)
    served, tasks = _checked(tasks)
    if not tasks:
        return
    first, progress = tasks[0], make_progress()
    ends: list[CommandEnd] = []
    with (
        Signals() as signals,
        Supervisor(first.redis_url, first.queue, lambda line: progress.say(line), first.log_level) as supervisor,
    ):
        for task in tasks:
            try:
                _run_task(task, served, began, supervisor, signals, progress, is_last=task is tasks[-1])
            except (Refused, LinesFailed) as end:
                if asked == 1:
                    raise
                end.show()
                ends.append(end)
            began, progress = time.monotonic(), make_progress()
    if ends:
        worst = max(ends, key=lambda end: end.exit_code)
        raise type(worst)(f"{len(ends)} of {asked} inputs were refused or have failed lines")


def _run_task(
    task: Task,
    served: list[str],
    began: float,
    supervisor: Supervisor,
    signals: Signals,
    progress: Progress,
    is_last: bool,
) -> None:
    with batch_folder(task):
        if _is_complete(task, served, is_held=task.redis_url is None):  # by another process, since the first look
            return
        with progress:
            if (
                task.redis_url is None
                and not task.hosted
                and not supervisor.has("worker")
                and load_manifest(str(task.root)) is None
                and task.source_file.stat().st_size < _SMALL_BYTES
            ):
                # Loading the model takes longer than checking a small file
                start_worker(task, supervisor)
            from pipeline.batch_run import BatchRun

            run = BatchRun(task, served, began)
            record = run.run(supervisor, signals, progress, is_last)
            run.check_accepted(record)
            if task.upload_to is not None and record.output is not None:
                from pipeline.uris.uploading import upload

                upload(task.output_file, task.upload_to, task.partition_by, signals, progress.say)
            if not task.keeps_folder:
                replace_folder(task.root)
    run.conclude(record)


def submit(task: Task) -> str:
    """Submit the batch to the fleet and return its id. Raises `Refused` and `Unfinished`."""
    from pipeline.batch_run import BatchRun

    assert task.redis_url is not None
    served, begun = _checked([task])
    if not begun:
        raise Refused(f"nothing was submitted: remove {task.output} to run its requests again")
    run = BatchRun(task, served, time.monotonic())
    with batch_folder(task):
        return run.submit(task.redis_url)


def _checked(tasks: Sequence[Task]) -> tuple[list[str], list[Task]]:
    """Check all runs; return the names of the models served here, and the incomplete runs.

    Print the end of each complete run. There are no names if no worker is started. Raises
    `Refused`.
    """
    served = served_names(tasks[0])
    for task in tasks:
        check_input(task)
        if isinstance(task.source, Path):
            _check_rows(task)
        check_output(task)
    tasks = [task for task in tasks if not _is_complete(task, served, refuses=len(tasks) == 1)]
    _check_uploads(tasks)
    with contextlib.ExitStack() as folders:
        for task in tasks:
            if isinstance(task.source, Uri):
                folders.enter_context(batch_folder(task, locked=True))
                _fetch(task, task.source)
                _check_rows(task)
    return served, tasks


def _is_complete(task: Task, served: list[str], refuses: bool = True, is_held: bool = False) -> bool:
    """Return whether a run is complete already; print its end if so.

    Raise `Refused` if the input, a flag or the output has changed since and `refuses` is true.
    `is_held` is whether this process holds the run's lock.
    """
    if not isinstance(task.output, Path) or task.partition_by:
        return False
    try:
        manifest = find_completed(task.root, task.output.absolute(), spec_of(task, served))
    except Refused:
        if refuses:
            raise
        return False
    if manifest is None:
        return False
    is_kept = finish_removal(task.root, manifest, is_held, task.keep_parts)
    print_completed(manifest, lacks_parts=task.keep_parts and not is_kept)
    return True


def _check_rows(task: Task) -> None:
    if task.rows is None:
        return
    check_rows(task.source_file, task.rows)
    if task.partition_by and is_parquet(str(task.source_file)):
        from pipeline.uris.partitions import check_types

        check_types(task.source_file, task.rows.keep_columns, task.partition_by)


def _fetch(task: Task, source: Uri) -> None:
    from pipeline.uris.fetch_process import run_fetch

    run_fetch(source, task.source_file, task.allowed, load_manifest(str(task.root)) is not None)


def _check_uploads(tasks: Sequence[Task]) -> None:
    """Raise `Refused` unless results can be uploaded; several inputs share one folder."""
    new = next((task for task in tasks if task.upload_to is not None and not task.root.exists()), None)
    if new is None or new.upload_to is None:
        return
    from pipeline.uris.partitions import check_empty
    from pipeline.uris.uploading import check_writable

    if new.partition_by:
        check_empty(new.upload_to)
    check_writable(new.upload_to, new.partition_by)


def served_names(task: Task) -> list[str]:
    """Return the names of the models served here; none if no worker is started.

    Raises `Refused`.
    """
    return [name for one in own_settings(task) for name in one.models]


@contextlib.contextmanager
def batch_folder(task: Task, locked: bool = False) -> Iterator[None]:
    """Lock the folder of the run, unless a fleet works in it.

    After a refusal, remove the folder unless it has results.
    """
    refusal = f"another run is at work on {task.root}: wait for it, or stop it"
    alone = locked or task.redis_url is None
    resumes = task.root.exists() and not holds_input_alone(task.root)
    with held(str(task.root), refusal, lock=RUN_LOCK) if alone else contextlib.nullcontext():
        if start_over_if_removed(task.root):
            resumes = False
        try:
            yield
        except (Refused, InputError):
            if not resumes and _may_be_removed(load_manifest(str(task.root)), alone):
                shutil.rmtree(task.root, ignore_errors=True)
            raise


def _may_be_removed(manifest: Manifest | None, alone: bool) -> bool:
    """Return whether the folder of a refused run may be removed.

    Unless the run is `alone`, another run may use the folder.
    """
    if manifest is None or manifest.state == "failed":
        return True
    return alone and not manifest.parts and manifest.state != "completed"


def check_input(task: Task) -> None:
    """Raise `Refused` unless the file exists and can be read."""
    source = task.source
    if isinstance(source, Uri):
        if not source.file_name:
            raise Refused(f"the input {source} names no file")
        if is_fetched(source, task.source_file):
            return
        with open_source(source, task.allowed):
            return
    try:
        source.open("rb").close()
    except FileNotFoundError:
        raise Refused(f"there is no file {source}") from None
    except OSError as error:
        raise Refused(f"the input {source} cannot be read: {error.strerror}") from None


def check_output(task: Task) -> None:
    """Raise `Refused` if the output is a folder or the input.

    Other errors are found when the batch is created.
    """
    output, source = task.output, task.source
    if isinstance(source, Uri) and source.contains(output):
        raise Refused(f"the output {output} is in the folder of the input: name another place")
    if isinstance(output, Uri):
        if output.is_http:
            raise Refused(f"results cannot be written to {output}: name a file, or a store such as s3")
        if not output.name:
            raise Refused(f"the output {output} is a folder")
        if output.is_same_as(source):
            raise Refused(f"the output {output} is the input itself")
        return
    if output.is_dir() and not task.partition_by:
        raise Refused(f"the output {output} is a folder")
    if output.is_file() and task.partition_by:
        raise Refused(f"the output {output} is a file: --partition-by writes a folder")
    if isinstance(source, Path) and output.exists() and output.samefile(source):
        raise Refused(f"the output {output} is the input itself")


def start_over_if_removed(root: Path) -> bool:
    """Empty the folder of a finished run if its output was removed, and return whether it was.

    The run then starts from the beginning.
    """
    manifest = load_manifest(str(root))
    if manifest is None or manifest.state != "completed" or not manifest.output or Path(manifest.output).exists():
        return False
    log.info("%s was removed after the run finished: starting over", manifest.output)
    empty_folder(root)
    return True
