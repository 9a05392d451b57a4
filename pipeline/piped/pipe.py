"""The two threads of a pipe: lines go from stdin into an open batch, and answers from there to
where they are written.
"""

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
_LOOK_SECONDS = 1.0  # between two looks at all lines, since a note of an answer may be lost
_FOLLOW_SECONDS = 60
_PATIENCE_SECONDS = 5.0  # for a reader of stdout that takes nothing at an end, or leaves before it
_POLL_SECONDS = 0.05


class Pipe:
    """A context in which both threads run.

    It is over when every line of stdin has its answer written, or when the reader of stdout is
    gone. At an order to stop, what has finished by then is written, as long as it is taken.
    """

    def __init__(self, queue: Queue, batch: str, spec: BatchSpec, sink: Sink, ordered: bool, signals: Signals) -> None:
        self.written = 0
        self.news = WakeUp()
        """Readable once it is over."""
        self.outstanding = Outstanding(ordered)
        self.intake = LineIntake(queue, batch, spec, self.outstanding, durable=sink.resumes)
        self.answers = AnswerReader(queue, batch, spec.root, self.outstanding)
        self._queue = queue
        self._batch = batch
        self._sink = sink
        self._signals = signals
        self._stop = WakeUp()
        self._is_stopping = self._is_left = False
        self._wait_until = 0.0  # for the end of stdin, once the reader of stdout is gone
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
        if not self._writer.is_alive():  # else it would go on with a descriptor of another file
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
        """Return whether it is over. Raise what ended a thread, `BrokenPipeError` for one."""
        is_over = not self._writer.is_alive()  # asked first: a thread notes its failure before it ends
        if self._failure is not None:
            raise self._failure
        was_left, self._is_left = self._is_left, self._sink.is_left()
        if not was_left:  # a look before, since it may leave with the last answer
            self._wait_until = time.monotonic() + _PATIENCE_SECONDS
        elif not is_over and (len(self.outstanding) or time.monotonic() >= self._wait_until):
            raise BrokenPipeError
        return is_over

    @property
    def answered(self) -> int:
        """How many lines have their answers, those included that came again and had them before."""
        return self.written + self.intake.answered

    @property
    def failed(self) -> int:
        """How many of these answers are errors."""
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
                    look_at = 0.0  # there is room for more lines of earlier runs, which no note names
        self.answers.collect_all()
        self._write_answers(with_gaps=not self._sink.resumes)
        self.news.ring()

    def _look(self) -> None:
        self._follow()
        if self.intake.are_new:
            self.intake.are_new = False
            wake(self._queue.redis, self._batch)  # the record says then how many lines there are
        self.answers.collect_all()

    def _follow(self) -> str:
        """Have commits notify the writer for some time, and notify it now."""
        return self._queue.follow_answers(self._batch, _FOLLOW_SECONDS)

    def _write_answers(self, with_gaps: bool = False) -> int:
        """Write what has finished, some MiB at a time; return how many lines that is."""
        before, is_more = self.written, True
        try:
            while is_more:
                is_more = self.answers.read(with_gaps)
                self._write_some(with_gaps)
        except PartDamaged:
            self._write_answers(with_gaps)  # those of other lines
            raise
        return self.written - before

    def _write_some(self, with_gaps: bool) -> None:
        if answers := self.outstanding.to_write(with_gaps):
            self._sink.write(answers.values())
            self.outstanding.note_written(answers)
            self.written += len(answers)
