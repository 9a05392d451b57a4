"""The first steps of a run: check its input, start the worker, then run or submit the batch.

The worker starts before this process imports what it needs for the batch itself, since loading a
model takes longer than all the rest.
"""

import contextlib
import logging
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from jobs.batch.manifest import load_manifest
from pipeline.batch_task import Task, start_worker
from pipeline.errors import CommandEnd, LinesFailed, Refused
from pipeline.private_folder import held
from pipeline.progress import Progress, make_progress
from pipeline.row_options import check_rows
from pipeline.signals import Signals
from pipeline.supervisor import Supervisor
from pipeline.worker_settings import worker_settings

_SMALL_BYTES = 4 * 1024 * 1024

log = logging.getLogger("run-batch")


def run_tasks(tasks: Sequence[Task]) -> None:
    """Run batches to their ends, one after the other on the same workers, and print their
    summaries. One of several that is refused, or has failed lines, does not keep others from
    running.

    Raises `Refused`, `Unfinished` and `Interrupted`.
    """
    began = time.monotonic()
    served, first, progress = _checked(tasks), tasks[0], make_progress()
    ends: list[CommandEnd] = []
    with (
        Signals() as signals,
        Supervisor(first.redis_url, first.queue, lambda line: progress.say(line), first.log_level) as supervisor,
    ):
        for task in tasks:
            try:
                _run_task(task, served, began, supervisor, signals, progress, is_last=task is tasks[-1])
            except (Refused, LinesFailed) as end:
                if len(tasks) == 1:
                    raise
                end.show()
                ends.append(end)
            began, progress = time.monotonic(), make_progress()
    if ends:
        worst = max(ends, key=lambda end: end.exit_code)
        raise type(worst)(f"{len(ends)} of {len(tasks)} inputs were refused or have failed lines")


def _run_task(
    task: Task,
    served: list[str],
    began: float,
    supervisor: Supervisor,
    signals: Signals,
    progress: Progress,
    is_last: bool,
) -> None:
    with progress, _folder(task):
        if (
            task.redis_url is None
            and not task.hosted
            and not supervisor.has("worker")
            and load_manifest(str(task.root)) is None
            and task.source.stat().st_size < _SMALL_BYTES
        ):
            # Loading the model takes longer than checking so small a file
            start_worker(task, supervisor)
        from pipeline.batch_run import BatchRun

        run = BatchRun(task, served, began)
        record = run.run(supervisor, signals, progress, is_last)
        run.check_accepted(record)
    run.conclude(record)


def submit(task: Task) -> str:
    """Submit the batch to the fleet and return its id. Raises `Refused` and `Unfinished`."""
    from pipeline.batch_run import BatchRun

    assert task.redis_url is not None
    run = BatchRun(task, _checked([task]), time.monotonic())
    with _folder(task):
        return run.submit(task.redis_url)


def _checked(tasks: Sequence[Task]) -> list[str]:
    """Return the names of the models that are served here; none if no worker is started.

    Raises `Refused`.
    """
    first = tasks[0]
    if first.hosted:
        served = [name for model in first.hosted for name in model.names]
    else:
        served = worker_settings(first.model, "", first.model_flags).models if first.starts_worker else []
    for task in tasks:
        check_input(task.source)
        if task.rows is not None:
            check_rows(task.source, task.rows)
        check_output(task.output, task.source)
    return served


@contextlib.contextmanager
def _folder(task: Task) -> Iterator[None]:
    """Lock the folder beside the output for the whole run; remove it after a refusal."""
    start_over_if_removed(task.root)
    resumes = task.root.exists()
    refusal = f"another run is at work on {task.root}: wait for it, or stop it"
    try:
        with contextlib.nullcontext() if task.redis_url is not None else held(str(task.root), refusal, lock=".run"):
            yield
    except Refused:
        if not resumes:
            shutil.rmtree(task.root, ignore_errors=True)
        raise


def check_input(source: Path) -> None:
    """Raise `Refused` unless the file exists and can be read."""
    try:
        if source.is_dir():
            raise Refused(f"the input {source} is a folder")
        source.open("rb").close()
    except FileNotFoundError:
        raise Refused(f"there is no file {source}") from None
    except OSError as error:
        raise Refused(f"the input {source} cannot be read: {error.strerror}") from None


def check_output(output: Path, source: Path) -> None:
    """Raise `Refused` if the output is a folder or the input.

    Other faults are found when the batch is made.
    """
    if output.is_dir():
        raise Refused(f"the output {output} is a folder")
    if output.exists() and output.samefile(source):
        raise Refused(f"the output {output} is the input itself")


def start_over_if_removed(root: Path) -> None:
    """Remove the parts of a finished run whose output was removed, so that it runs anew."""
    manifest = load_manifest(str(root))
    if (
        manifest is not None
        and manifest.state == "completed"
        and manifest.output
        and not Path(manifest.output).exists()
    ):
        log.info("%s was removed after the run finished: starting over", manifest.output)
        shutil.rmtree(root)
