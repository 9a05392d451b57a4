"""The batch of one run: create or submit it, follow it to its end, print its summary.

`batch_start` imports this module after it has started the worker.
"""

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import redis

from jobs.batch.client import BatchRecord, BatchRefused, BatchSpec, create_batch, get_batch
from jobs.batch.manifest import load_manifest
from jobs.queue import keys
from jobs.queue.connection import check_server, connect
from jobs.queue.registry import SERVING
from jobs.queue.request_queue import Queue, QueueUnavailable
from pipeline.batch_task import Task, own_defaults, spec_of, start_worker
from pipeline.errors import Interrupted, Refused, Unfinished, one_line
from pipeline.hosting.host import ModelHost, fit_together
from pipeline.progress import Counts, Progress
from pipeline.signals import Signals
from pipeline.summary import check_end, counts_of, print_problems, print_summary
from pipeline.supervisor import Supervisor
from pipeline.waiting import GracePeriod

# Intervals between reads. Reading the state takes a tenth of the time of reading the whole record;
# counting the waiting lines takes little more.
_STATE_SECONDS = 0.05
_BEGINNING_SECONDS = 0.02  # while nothing runs: tokens/s count from the first claim
_IDLE_RECORD_SECONDS = 0.15
_BUSY_RECORD_SECONDS = 0.5
_REDIS_AWAY_SECONDS = 0.2
_PROBLEM_SECONDS = 5.0
_REST_SECONDS = 5.0
"""Start delay of the rest of the control plane; the first tokens need one process and the CPU."""

log = logging.getLogger("run-batch")


class BatchRun:
    """The batch of one run, from its creation to its end.

    Methods raise `Refused`, `Unfinished` and `Interrupted`; the message includes `kept`.
    """

    kept = "finished results are kept, run the same command again to go on"

    def __init__(self, task: Task, served: list[str], began: float) -> None:
        """Set up the run.

        `served` are the names of the models served here, if any. `began` is the start of the run
        on the monotonic clock.
        """
        self._task = task
        self._served = served
        self._began = began
        self._redis_away = GracePeriod(task.queue.redis_retry_seconds)
        self._leaderless = GracePeriod(_PROBLEM_SECONDS)
        self._stalled = GracePeriod(_PROBLEM_SECONDS)
        self._answering_since: float | None = None
        self._generated_before: int | None = None  # by batches that ran before on the same queue

    def submit(self, url: str) -> str:
        """Submit the batch to the fleet and return its id."""
        with self._failures(), connect(url) as client:
            check_server(client)
            return self._create(client, self._spec(None)).id

    def run(self, supervisor: Supervisor, signals: Signals, progress: Progress, is_last: bool) -> BatchRecord:
        """Run the batch to its end; stop the child processes after the last batch."""
        with self._failures():
            return self._run(supervisor, signals, progress, is_last)

    def check_accepted(self, record: BatchRecord) -> None:
        """Raise `Refused` for a refused input, after printing its problems."""
        if record.state == "failed":
            print_problems(self._task.source, record.errors)
            raise Refused(f"{self._task.source} was refused: {count_of(record.errors)}; nothing was run")

    def conclude(self, record: BatchRecord) -> None:
        """Print the summary. Raises `LinesFailed`."""
        now = time.monotonic()
        print_summary(record, now - self._began, now - (self._answering_since or now), self._task.upload_to)
        check_end("the batch", record.state, record.total, record.failed, self._task.fail_on_error)

    def _run(self, supervisor: Supervisor, signals: Signals, progress: Progress, is_last: bool) -> BatchRecord:
        task = self._task
        if task.redis_url is None and not supervisor.has("jobs"):
            supervisor.start_jobs(rest_after=_REST_SECONDS)
        spec = self._spec(None if self._is_under_way(supervisor.queue.redis) else supervisor.queue)
        batch_id = self._create(supervisor.queue.redis, spec).id
        if task.redis_url is None:
            log.debug(
                "batch %s; another terminal sees it with REDIS_URL=%s pipeline tail %s",
                batch_id,
                supervisor.redis_url,
                batch_id,
            )
        else:
            log.info("batch %s", batch_id)
        ended = False
        try:
            with self._host(supervisor, progress) as host:
                record = self._follow(batch_id, spec, supervisor, signals, progress, host)
            ended = True
        finally:
            if is_last or not ended:
                self._wind_up(ended, supervisor, signals, progress)
        return record

    def _host(
        self, supervisor: Supervisor, progress: Progress
    ) -> "contextlib.AbstractContextManager[ModelHost | None]":
        task = self._task
        if not task.hosted:
            return contextlib.nullcontext()
        return ModelHost(task.hosted, task.hosting, supervisor, progress.say)

    def _is_under_way(self, client: redis.Redis) -> bool:
        """Return whether the fleet already runs this batch; workers are then not checked."""
        manifest = load_manifest(str(self._task.root))
        try:
            return (
                self._task.redis_url is not None
                and manifest is not None
                and not get_batch(client, manifest.batch_id).ended
            )
        except KeyError:
            return False

    def _spec(self, queue: Queue | None) -> BatchSpec:
        """Return the batch's specification.

        With a `queue`, lines may only name the models of the workers that serve it now.
        """
        task = self._task
        models: tuple[str, ...] | None = None
        if task.redis_url is None:
            models = tuple(self._served)
        elif queue is not None:
            models = self._fleet_models(queue)
        by_model = bool(task.hosted) and not fit_together(task.hosted, task.hosting)
        return msgspec.structs.replace(spec_of(task, self._served, models), by_model=by_model)

    def _fleet_models(self, queue: Queue) -> tuple[str, ...]:
        served = sorted({name for worker in queue.workers() if worker.state in SERVING for name in worker.models})
        names = f"served are: {', '.join(served)}" if served else "no worker serves anything"
        if not self._served and (not served or (self._task.model is not None and self._task.model not in served)):
            asked = f"no worker serves {self._task.model}" if self._task.model else "no worker is there to answer"
            raise Refused(f"{asked}; {names}: start one (pipeline worker --model …) or add --local-worker")
        return tuple(dict.fromkeys([*self._served, *served]))

    def _create(self, client: redis.Redis, spec: BatchSpec) -> BatchRecord:
        return create_batch(client, spec, retry_failed=self._task.retry_failed, defaults=own_defaults(self._task))

    def _follow(
        self,
        batch_id: str,
        spec: BatchSpec,
        supervisor: Supervisor,
        signals: Signals,
        progress: Progress,
        host: ModelHost | None,
    ) -> BatchRecord:
        """Supervise until the batch has ended, and return its record.

        The worker starts as soon as lines wait: during validation for a large input, else after
        it. If Redis lost the batch, it is created again from its manifest.
        """
        while True:
            pause = supervisor.check()
            if host is not None:
                pause = min(pause, host.check())
            try:
                record = get_batch(supervisor.queue.redis, batch_id, retry_seconds=0.0)
                is_led = bool(supervisor.queue.redis.exists(keys.LEADER))
                generated = self._generated(supervisor)
            except KeyError:
                log.warning("Redis lost %s; creating it again from %s", batch_id, self._task.root)
                self._create(supervisor.queue.redis, spec)
                continue
            except (redis.RedisError, QueueUnavailable) as error:
                self._wait_for_redis(error, signals)
                continue
            is_over = self._is_over(record)
            progress.update(self._counts(record, generated))  # read before the counts, so the final counts are complete
            if is_over:
                return record
            if signals.stops:
                raise Interrupted(self._farewell(batch_id))
            self._check_moves(record, is_led)
            if host is not None and host.problem:
                raise Unfinished(f"{host.problem}; {self.kept}")
            if self._has_early_lines(supervisor, record) or self._has_work(record):
                self._ensure_worker(supervisor, record)
            longest = _BUSY_RECORD_SECONDS if record.running else _IDLE_RECORD_SECONDS
            self._wait(record, min(pause, longest), supervisor, signals)

    def _is_over(self, record: BatchRecord) -> bool:
        return record.ended

    def _has_work(self, record: BatchRecord) -> bool:
        return record.state == "in_progress" and record.completed + record.failed < record.total

    def _wait(self, record: BatchRecord, seconds: float, supervisor: Supervisor, signals: Signals) -> None:
        """Wait for `seconds`, or until a signal or a change of the batch.

        A change is a new state or, while nothing runs, a new number of waiting lines.
        """
        deadline = time.monotonic() + seconds
        look = _STATE_SECONDS if record.running else _BEGINNING_SECONDS
        while (left := deadline - time.monotonic()) > 0 and not signals.wait(min(left, look)):
            try:
                if _has_moved(supervisor.queue.redis, record):
                    return
            except redis.RedisError:
                return

    def _wait_for_redis(self, error: Exception, signals: Signals) -> None:
        """Wait briefly, or raise `Unfinished` if Redis has been unavailable for too long.

        The next check restarts a private Redis.
        """
        if signals.stops:
            raise Interrupted(f"Interrupted: {self.kept}.")
        if self._redis_away.is_over():
            raise Unfinished(f"Redis cannot be used: {one_line(error)}; {self.kept}")
        self._leaderless.reset()  # unknown
        signals.wait(_REDIS_AWAY_SECONDS)

    def _check_moves(self, record: BatchRecord, is_led: bool) -> None:
        """Raise `Unfinished` if the batch has made no progress for too long.

        It then waits for validation without a control plane, or its record has a problem.
        """
        self._redis_away.reset()
        if self._leaderless.is_over(self._task.redis_url is not None and record.state == "validating" and not is_led):
            raise Unfinished(f"no control plane runs on this queue, so {record.id} waits: start `pipeline jobs`")
        if self._stalled.is_over(record.problem is not None):
            raise Unfinished(f"{record.problem}; {self._shared_files()}{self.kept}")

    def _shared_files(self) -> str:
        if self._task.redis_url is None:
            return ""
        return "the fleet's `pipeline jobs` works on the same paths, so put input and output where it sees them; "

    def _has_early_lines(self, supervisor: Supervisor, record: BatchRecord) -> bool:
        """Return whether lines wait already during validation, on a private Redis.

        If the input is refused, the worker ends with the run.
        """
        if self._task.redis_url is not None or record.state != "validating":
            return False
        try:
            return bool(supervisor.queue.redis.exists(keys.bodies(record.id)))
        except redis.RedisError:  # the next read reports it
            return False

    def _ensure_worker(self, supervisor: Supervisor, record: BatchRecord) -> None:
        if self._task.starts_worker and not self._task.hosted and not supervisor.has("worker"):
            start_worker(self._task, supervisor)
        if self._answering_since is None and record.running:
            self._answering_since = time.monotonic()

    def _generated(self, supervisor: Supervisor) -> int | None:
        """Return the output tokens generated so far, or None if the queue is shared."""
        if self._task.redis_url is not None:
            return None
        # `token_totals` would wait for an unavailable Redis, which this process must restart
        generated = int(supervisor.queue.redis.hget(keys.TOTALS, "generated") or 0)
        if self._generated_before is None:
            self._generated_before = generated
        return max(0, generated - self._generated_before)

    def _counts(self, record: BatchRecord, generated: int | None) -> Counts:
        counts = counts_of(record, self._note(record))
        return counts if generated is None else replace(counts, tokens=generated)

    def _note(self, record: BatchRecord) -> str:
        note = ""
        if record.ended:
            return note
        if record.state == "validating":
            note = "checking the input"
        elif record.state == "finalizing" or record.completed + record.failed == record.total:
            note = "writing the results"
        elif not record.running:
            note = "waiting for the model to load" if self._task.starts_worker else "waiting for a worker"
        return note

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """Convert errors of the queue to `Refused` or `Unfinished`."""
        try:
            yield
        except BatchRefused as error:
            raise Refused(str(error)) from None
        except QueueUnavailable as error:
            raise Unfinished(f"{one_line(error)}; {self.kept}") from None

    def _farewell(self, batch_id: str) -> str:
        if self._task.redis_url is None:
            return f"Interrupted: {self.kept}."
        return (
            f"Interrupted: the fleet goes on with {batch_id}; `pipeline wait {batch_id}` or the same command comes back"
            " for the results."
        )

    def _wind_up(self, ended: bool, supervisor: Supervisor, signals: Signals, progress: Progress) -> None:
        """Stop the worker, then the control plane, which stores finished lines.

        A second stop signal ends everything at once.
        """

        def insisted() -> bool:
            return signals.stops > 1

        if ended and self._task.redis_url is None:
            supervisor.kill()
            return
        if signals.stops:
            progress.say("stopping; press Ctrl-C again to stop at once")
        supervisor.stop(insisted=insisted)


def _has_moved(client: redis.Redis, record: BatchRecord) -> bool:
    """Return whether the state or, if nothing runs, the number of waiting lines changed."""
    models = [] if record.running else record.models
    with client.pipeline(transaction=False) as pipeline:
        pipeline.hget(keys.batch(record.id), "state")
        for model in models:
            pipeline.llen(keys.ready(record.id, model))
        state, *waiting = pipeline.execute()
    return bool(state != record.state.encode() or (models and sum(waiting) != record.waiting))


def count_of(errors: list[Any]) -> str:
    """Return the number of bad lines as text."""
    return (
        f"{len(errors)} bad line{'s' if len(errors) != 1 else ''}" if errors and errors[0].line else "it cannot be used"
    )
