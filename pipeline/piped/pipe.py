"""The two threads of a pipe: one appends lines of stdin to an open batch, one writes answers."""

import threading
import time
from collections.abc import Callable

from jobs.batch.manifest import BatchSpec
from jobs.batch.parts import PartDamaged
from jobs.host import WakeUp
from jobs.queue.request_queue import Queue
from jobs.queue.scripts import MAX_ITEMS
from jobs.queue.tasks import wake
from pipeline.piped.answers import AnswerReader
from pipeline.piped.intake import LineIntake
from pipeline.piped.outstanding import Outstanding
from pipeline.piped.sinks import Sink
from pipeline.piped.stdin_lines import StdinLines
from pipeline.signals import Signals

_STDIN = 0
_LOOK_SECONDS = 1.0  # between two checks of all lines, since a notification may be lost
_FOLLOW_SECONDS = 60
_PATIENCE_SECONDS = 5.0  # for a blocked reader of stdout at the end, and for stdin after it left
_POLL_SECONDS = 0.05


class Pipe:
    """A context in which both threads run.

    It is over when the answers to all lines of stdin are written, or when the reader of stdout is
    gone. At a stop signal, finished answers are written as long as the reader accepts them.
    """

    def __init__(self, queue: Queue, batch: str, spec: BatchSpec, sink: Sink, ordered: bool, signals: Signals) -> None:
        self.written = 0
        self.news = WakeUp()
        """Readable when the pipe is over."""
        self.outstanding = Outstanding(ordered)
        self.intake = LineIntake(queue, batch, spec, self.outstanding, durable=sink.resumes)
        self.answers = AnswerReader(queue, batch, spec.root, self.outstanding)
        self._queue = queue
        self._batch = batch
        self._sink = sink
        self._signals = signals
        self._stop = WakeUp()
        self._is_stopping = self._is_left = False
        self._wait_until = 0.0  # deadline for the end of stdin after the reader of stdout left
        self._is_resumed = self.is_read = False
        self._failure: Exception | None = None
        self._reader = threading.Thread(target=self._run, args=(self._read,), name="stdin", daemon=True)
        self._writer = threading.Thread(target=self._run, args=(self._write,), name="answers", daemon=True)

    def __enter__(self) -> "Pipe":
        self._reader.start()
        self._writer.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_stopping = True
        self._stop.ring()
        self.outstanding.close()
        for thread in (self._reader, self._writer):
            self._wait_for(thread)
        if not self._writer.is_alive():  # a live writer would write to a reused descriptor
            self._sink.close()

    def _wait_for(self, thread: threading.Thread) -> None:
        taken, deadline = -1, 0.0
        while thread.is_alive() and self._signals.stops < 2:
            if self._sink.taken != taken:
                taken, deadline = self._sink.taken, time.monotonic() + _PATIENCE_SECONDS
            elif time.monotonic() >= deadline:
                return
            thread.join(_POLL_SECONDS)

    def check(self) -> bool:
        """Return whether the pipe is over. Raise the error of a thread, or `BrokenPipeError`."""
        is_over = not self._writer.is_alive()  # read first: a thread stores its failure before it ends
        if self._failure is not None:
            raise self._failure
        was_left, self._is_left = self._is_left, self._sink.is_left()
        if not was_left:  # the reader may leave right after the last answer
            self._wait_until = time.monotonic() + _PATIENCE_SECONDS
        elif not is_over and (len(self.outstanding) or time.monotonic() >= self._wait_until):
            raise BrokenPipeError
        return is_over

    @property
    def answered(self) -> int:
        """Number of answered lines, including repeated lines that were answered earlier."""
        return self.written + self.intake.answered

    @property
    def failed(self) -> int:
        """Number of errors among these answers."""
        return self.intake.failed + self.answers.failed

    def _run(self, body: Callable[[], None]) -> None:
        try:
            body()
        except Exception as error:
            self._failure = self._failure or error
            self.outstanding.close()
            self.news.ring()

    def _read(self) -> None:
        self._is_resumed = self.intake.resume(self._sink.written, self._sink.failed, self._sink.refused)
        if not self._is_resumed:
            return
        for lines in StdinLines(_STDIN, self._stop):
            while lines:
                if not (room := min(self.outstanding.wait_for_room(), MAX_ITEMS)):
                    return
                if self.intake.take(lines[:room]):
                    self._follow()
                lines = lines[room:]
        self.is_read = True
        self._follow()

    def _write(self) -> None:
        last_id, look_at = self._follow(), 0.0
        while not self._is_stopping and not (self.is_read and not len(self.outstanding)):
            left = look_at - time.monotonic()
            if left > 0:
                lines, last_id = self._queue.answered(self._batch, last_id, left)
                self.answers.collect(lines)
                self._write_answers()
            else:
                look_at = time.monotonic() + _LOOK_SECONDS
                self._look()
                if self._write_answers() and not self._is_resumed:
                    look_at = 0.0  # lines of earlier runs that have room now get no notification
        self.answers.collect_all()
        self._write_answers(with_gaps=not self._sink.resumes)
        self.news.ring()

    def _look(self) -> None:
        self._follow()
        if self.intake.are_new:
            self.intake.are_new = False
            wake(self._queue.redis, self._batch)  # updates the number of lines in the record
        self.answers.collect_all()

    def _follow(self) -> str:
        """Let commits notify the writer for the next minute, and notify it now."""
        return self._queue.follow_answers(self._batch, _FOLLOW_SECONDS)

    def _write_answers(self, with_gaps: bool = False) -> int:
        """Write finished answers, some MiB at a time; return their number."""
        before, is_more = self.written, True
        try:
            while is_more:
                is_more = self.answers.read(with_gaps)
                self._write_some(with_gaps)
        except PartDamaged:
            self._write_answers(with_gaps)  # the answers of other lines
            raise
        return self.written - before

    def _write_some(self, with_gaps: bool) -> None:
        if answers := self.outstanding.to_write(with_gaps):
            self._sink.write(answers.values())
            self.outstanding.note_written(answers)
            self.written += len(answers)
