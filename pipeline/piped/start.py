"""The first steps of `run-batch -`: check the output, start the worker, then run the pipe."""

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from batch_inference_pipeline.private_folder import private_folder
from jobs.batch.manifest import load_manifest
from pipeline.batch_start import batch_folder, served_names
from pipeline.batch_task import Task, start_worker
from pipeline.errors import Refused
from pipeline.held_folder import empty_folder
from pipeline.progress import Progress, make_progress
from pipeline.signals import Signals
from pipeline.supervisor import Supervisor

log = logging.getLogger("run-batch")


def run_pipe(task: Task, output: Path | None, ordered: bool) -> None:
    """Answer the lines of stdin, in the file `output` or on stdout, until stdin ends.

    Raises `Refused`, `Unfinished`, `Interrupted` and `BrokenPipeError`.
    """
    if sys.stdin is None or (output is None and sys.stdout is None):
        raise Refused("stdin or stdout is closed: lines come from one, and answers go to the other")
    began, served, progress = time.monotonic(), served_names(task), make_progress()
    with (
        _placed(task, output) as placed,
        Signals() as signals,
        Supervisor(None, task.queue, lambda line: progress.say(line), task.log_level) as supervisor,
    ):
        if not task.hosted:
            start_worker(placed, supervisor)
        _run(placed, served, began, output, ordered, supervisor, signals, progress)


def _run(
    task: Task,
    served: list[str],
    began: float,
    output: Path | None,
    ordered: bool,
    supervisor: Supervisor,
    signals: Signals,
    progress: Progress,
) -> None:
    from pipeline.piped.piped_run import PipedRun

    run = PipedRun(task, served, began, output, ordered)
    with progress:
        record = run.run(supervisor, signals, progress, is_last=True)
    run.conclude(record)


@contextlib.contextmanager
def _placed(task: Task, output: Path | None) -> Iterator[Task]:
    """Lock the folder beside the output, or a temporary one, and yield the task with it."""
    with contextlib.ExitStack() as stack:
        if output is None:
            task = replace(task, output=stack.enter_context(private_folder()) / "answers")
        else:
            from pipeline.piped.sinks import check_answers, check_sink

            check_sink(output, task.root)
        stack.enter_context(batch_folder(task))
        if output is not None:
            check_answers(output, task.root)
            if not output.exists():
                _start_over(task.root, output)
        yield task


def _start_over(root: Path, output: Path) -> None:
    """Empty the folder of an earlier pipe whose output was removed.

    The folder of a run with an input file is kept, since that run has no output until it ends. The
    caller holds the folder's lock.
    """
    manifest = load_manifest(str(root))
    if manifest is None or not manifest.spec.streams_input:
        return
    log.info("%s was removed: starting over", output)
    empty_folder(root)
