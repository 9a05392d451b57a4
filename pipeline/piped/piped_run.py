"""The open batch of one pipe: create or resume it, and follow it until the pipe is over."""

import time
from dataclasses import replace
from pathlib import Path

import msgspec

from jobs.batch.client import BatchRecord, BatchSpec
from jobs.batch.open_requests import SOURCE_NAME
from jobs.batch.parts import PartDamaged
from jobs.queue.request_queue import Queue
from jobs.store.storage import StoreError, join
from pipeline.batch_run import BatchRun
from pipeline.batch_task import Task
from pipeline.errors import Interrupted, Unfinished, one_line
from pipeline.hosting.host import ModelHost
from pipeline.piped.pipe import Pipe
from pipeline.piped.sinks import FileSink, StdoutSink
from pipeline.progress import Counts, Progress, duration
from pipeline.signals import Signals
from pipeline.stderr import write_line
from pipeline.summary import check_end
from pipeline.supervisor import Supervisor


class PipedRun(BatchRun):
    """A run of lines of stdin. The batch stays open, since a later run may resume it.

    Methods also raise `BrokenPipeError` when the reader of stdout is gone.
    """

    def __init__(self, task: Task, served: list[str], began: float, output: Path | None, ordered: bool) -> None:
        """Set up the run as `BatchRun`; `output` is the file for the answers (None: stdout)."""
        super().__init__(task, served, began)
        self._output = output
        self._ordered = ordered
        self._pipe: Pipe
        if output is None:
            self.kept = "the answers so far are on stdout, and nothing else is kept"

    def run(self, supervisor: Supervisor, signals: Signals, progress: Progress, is_last: bool) -> BatchRecord:
        """Run the batch; errors of the disk and lost answers also raise `Unfinished`."""
        try:
            return super().run(supervisor, signals, progress, is_last)
        except (PartDamaged, StoreError) as error:
            raise Unfinished(f"{one_line(error)}; {self.kept}") from None

    def conclude(self, record: BatchRecord) -> None:
        """Print the summary on stderr. Raises `LinesFailed`."""
        seconds = time.monotonic() - self._began
        took = f"{seconds:.1f} s" if seconds < 60 else duration(seconds)
        write_line(f"{self._counted()}; {took}")
        check_end("the batch", "completed", self._pipe.answered, self._pipe.failed, self._task.fail_on_error)

    def _spec(self, queue: Queue | None) -> BatchSpec:
        source = join(str(self._task.root), SOURCE_NAME)
        return msgspec.structs.replace(
            super()._spec(queue), input=source, output=None, streams_input=True, skip_invalid_requests=True
        )

    def _follow(
        self,
        batch_id: str,
        spec: BatchSpec,
        supervisor: Supervisor,
        signals: Signals,
        progress: Progress,
        host: ModelHost | None,
    ) -> BatchRecord:
        sink = StdoutSink() if self._output is None else FileSink(self._output, batch_id)
        self._pipe = Pipe(supervisor.queue, batch_id, spec, sink, self._ordered, signals)
        try:
            with self._pipe:
                return super()._follow(batch_id, spec, supervisor, signals, progress, host)
        except Interrupted:
            raise Interrupted(f"Interrupted: {self._counted()}{self._kept()}.") from None

    def _is_over(self, record: BatchRecord) -> bool:
        if self._pipe.check():
            return True
        if record.ended:
            raise Unfinished(f"{record.id} was {record.state} while lines arrived; {self._counted()}")
        return False

    def _has_work(self, record: BatchRecord) -> bool:
        return True

    def _wait(self, record: BatchRecord, seconds: float, supervisor: Supervisor, signals: Signals) -> None:
        signals.wait(seconds, self._pipe.news)

    def _counts(self, record: BatchRecord, generated: int | None) -> Counts:
        counts = super()._counts(record, generated)
        waiting = len(self._pipe.outstanding) + self._pipe.intake.earlier
        done = self._pipe.answered
        return replace(counts, total=done + waiting, done=done, failed=self._pipe.failed)

    def _note(self, record: BatchRecord) -> str:
        if not len(self._pipe.outstanding) and not self._pipe.intake.earlier:
            return "" if self._pipe.is_read else "waiting for lines"
        return "" if record.running else "waiting for the model to load"

    def _wind_up(self, ended: bool, supervisor: Supervisor, signals: Signals, progress: Progress) -> None:
        """Let the control plane store results if a later run can resume, else kill everything."""
        if self._output is None:
            supervisor.kill()
        else:
            super()._wind_up(False, supervisor, signals, progress)

    def _counted(self) -> str:
        read = self._pipe.intake.read
        return f"{read} line{'s' if read != 1 else ''} read, {self._pipe.answered} answered, {self._pipe.failed} failed"

    def _kept(self) -> str:
        return "" if self._output is None else "; run the same command again to go on"
