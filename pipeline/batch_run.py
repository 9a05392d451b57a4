"""One run of a batch file: hand it in, keep everything running until it is done, say what came of it."""

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from jobs import keys
from jobs.batches import BatchRecord, BatchRefused, BatchSpec, Busy, StoreError, create_batch, get_batch
from jobs.connection import ServerError, check_server, connect
from jobs.manifest import load_manifest
from jobs.queue import Queue, QueueUnavailable
from jobs.settings import QueueSettings
from pipeline.batch_wait import counts_of
from pipeline.child import ChildFailed
from pipeline.errors import Interrupted, Refused, Unfinished, one_line
from pipeline.progress import Counts, Progress, make_progress
from pipeline.signals import Signals
from pipeline.stack import Stack
from pipeline.summary import Summary, print_problems, print_summary
from pipeline.worker_settings import worker_settings

_LOOK_SECONDS = 0.05  # at the state, which takes a tenth of the time that the whole record takes
_WAITING_SECONDS = 0.15  # at the record, until something runs
_RUNNING_SECONDS = 0.5
_AWAY_SECONDS = 0.2
_PROBLEM_SECONDS = 5.0
_SMALL_BYTES = 4 * 1024 * 1024
_SHUTDOWN_SECONDS = 1.0
_RESUMES = "what is finished is kept, run the same command again to go on"
_FAREWELL = f"Interrupted: {_RESUMES}."
_SERVING = ("loading", "initializing", "ready")

log = logging.getLogger("run-batch")


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a person asked for. With no `redis_url` everything runs here; `model_flags` are the values of the model flags."""

    source: Path
    output: Path
    model: str | None
    redis_url: str | None
    queue: QueueSettings
    model_flags: Mapping[str, Any]
    worker_arguments: list[str]
    starts_worker: bool
    replicas: int
    retry_failed: bool
    fail_on_error: bool
    log_level: str

    @property
    def root(self) -> Path:
        """The folder beside the output from which a second start goes on."""
        return self.output.with_name(f"{self.output.name}.parts").absolute()


class BatchRun:
    """`run` to the end, or `hand_in` only. Raises `Refused`, `Unfinished` and `Interrupted`."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._began = time.monotonic()
        self._led_at = self._began
        self._answering_since: float | None = None
        self._served: list[str] = []
        if task.starts_worker:
            self._served = worker_settings(task.model, "", task.model_flags).models
        check_input(task.source)
        check_output(task.output, task.source)

    def hand_in(self) -> str:
        """Gives the batch to the fleet and returns its id."""
        assert self._task.redis_url is not None
        with _failures(), self._folder(), connect(self._task.redis_url) as client:
            check_server(client)
            return self._create(client, self._spec(None)).id

    def run(self) -> None:
        """Runs the batch to its end and prints what came of it."""
        task = self._task
        with Signals() as signals, make_progress() as progress, _failures(), self._folder():
            with Stack(task.redis_url, task.queue, progress.say, task.log_level) as stack:
                record = self._run(stack, signals, progress)
            if record.state == "failed":
                print_problems(task.source, record.errors)
                raise Refused(f"{task.source} was refused: {count_of(record.errors)}; nothing was run")
        self._conclude(record)

    @contextlib.contextmanager
    def _folder(self) -> Iterator[None]:
        """Holds the folder beside the output for the whole run; a refusal leaves none behind."""
        root = self._task.root
        start_over_if_removed(root)
        resumes = root.exists()
        try:
            with contextlib.nullcontext() if self._task.redis_url is not None else alone(root):
                yield
        except (Refused, BatchRefused):
            if not resumes:
                shutil.rmtree(root, ignore_errors=True)
            raise

    def _run(self, stack: Stack, signals: Signals, progress: Progress) -> BatchRecord:
        task = self._task
        if task.redis_url is None:
            if load_manifest(str(task.root)) is None and task.source.stat().st_size < _SMALL_BYTES:
                self._start_worker(stack)  # it is still importing when the check of so small a file is over
            stack.start_jobs()
        spec = self._spec(None if self._is_under_way(stack.queue.redis) else stack.queue)
        batch_id = self._create(stack.queue.redis, spec).id
        if task.redis_url is None:
            log.info("batch %s; another terminal sees it with REDIS_URL=%s pipeline tail %s", batch_id, stack.redis_url, batch_id)
        else:
            log.info("batch %s", batch_id)
        ended = False
        try:
            record = self._follow(batch_id, spec, stack, signals, progress)
            ended = True
        finally:
            self._wind_up(ended, stack, signals, progress)
        return record

    def _is_under_way(self, client: redis.Redis) -> bool:
        """Whether the fleet has this run's batch already, so that it matters no more who is there to answer."""
        manifest = load_manifest(str(self._task.root))
        try:
            return self._task.redis_url is not None and manifest is not None and not get_batch(client, manifest.batch_id).ended
        except KeyError:
            return False

    def _spec(self, queue: Queue | None) -> BatchSpec:
        """`queue` is given where the workers that are there now must do: then their models are the only ones that lines may name."""
        task = self._task
        models: tuple[str, ...] | None = None
        if task.redis_url is None:
            models = tuple(self._served)
        elif queue is not None:
            models = self._fleet_models(queue)
        default = self._served[0] if self._served else task.model
        return BatchSpec(
            input=str(task.source.absolute()), root=str(task.root), output=str(task.output.absolute()), error_file="inline",
            default_model=default, models=models, seed=task.model_flags["seed"],
        )  # fmt: skip

    def _fleet_models(self, queue: Queue) -> tuple[str, ...]:
        served = sorted({name for worker in queue.workers() if worker.state in _SERVING for name in worker.models})
        names = f"served are: {', '.join(served)}" if served else "no worker serves anything"
        if not self._served and (not served or (self._task.model is not None and self._task.model not in served)):
            asked = f"no worker serves {self._task.model}" if self._task.model else "no worker is there to answer"
            raise Refused(f"{asked}; {names}: start one (pipeline worker --model …) or add --local-worker")
        return tuple(dict.fromkeys([*self._served, *served]))

    def _create(self, client: redis.Redis, spec: BatchSpec) -> BatchRecord:
        return create_batch(client, spec, retry_failed=self._task.retry_failed)

    def _follow(self, batch_id: str, spec: BatchSpec, stack: Stack, signals: Signals, progress: Progress) -> BatchRecord:
        """Supervises until the batch has ended; the worker starts once the input has been found good and something is left to do.

        A Redis that came back empty gets the batch again, from its manifest.
        """
        troubled_since: float | None = None
        away_since: float | None = None
        while True:
            pause = stack.check()
            try:
                record = get_batch(stack.queue.redis, batch_id, retry_seconds=0.0)
                away_since = None
            except KeyError:
                log.warning("Redis knows nothing of %s any more: it is made again from %s", batch_id, self._task.root)
                self._create(stack.queue.redis, spec)
                continue
            except (redis.RedisError, QueueUnavailable) as error:
                away_since = away_since or time.monotonic()
                self._check_patience(error, away_since, signals)
                signals.wait(_AWAY_SECONDS)
                continue
            if record.ended:
                progress.update(self._counts(record))
                return record
            if signals.stops:
                raise Interrupted(self._farewell(batch_id))
            if record.state == "in_progress" and record.completed + record.failed < record.total:
                self._ensure_worker(stack, record)
            progress.update(self._counts(record))
            now = time.monotonic()
            troubled_since = (troubled_since or now) if record.problem else None
            if troubled_since is not None and now - troubled_since > _PROBLEM_SECONDS:
                raise Unfinished(f"{record.problem}; {self._shared_files()}{_RESUMES}")
            self._check_control_plane(record, stack)
            self._wait(record, min(pause, _RUNNING_SECONDS if record.running else _WAITING_SECONDS), stack, signals)

    @staticmethod
    def _wait(record: BatchRecord, seconds: float, stack: Stack, signals: Signals) -> None:
        """Returns after `seconds`, at a signal, or soon after the batch has moved to another state."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 and not signals.wait(min(left, _LOOK_SECONDS)):
            try:
                if stack.queue.redis.hget(keys.batch(record.id), "state") != record.state.encode():
                    return
            except redis.RedisError:
                return

    def _check_patience(self, error: Exception, away_since: float, signals: Signals) -> None:
        """Redis may be away for a while: a private one is started again by the next check."""
        if signals.stops:
            raise Interrupted(_FAREWELL)
        if time.monotonic() - away_since > self._task.queue.redis_retry_seconds:
            raise Unfinished(f"Redis cannot be used: {one_line(error)}; {_RESUMES}")

    def _check_control_plane(self, record: BatchRecord, stack: Stack) -> None:
        """A batch that nobody validates would wait for ever. Raises `Unfinished`."""
        waits = self._task.redis_url is not None and record.state == "validating"
        if not waits or stack.queue.redis.exists(keys.LEADER):
            self._led_at = time.monotonic()
        elif time.monotonic() - self._led_at > _PROBLEM_SECONDS:
            raise Unfinished(f"no control plane is at work on this queue, so {record.id} waits: start `pipeline jobs`")

    def _shared_files(self) -> str:
        if self._task.redis_url is None:
            return ""
        return "the fleet's `pipeline jobs` works on the same paths, so put input and output where it sees them; "

    def _ensure_worker(self, stack: Stack, record: BatchRecord) -> None:
        if self._task.starts_worker and not stack.has("worker"):
            self._start_worker(stack)
        if self._answering_since is None and record.running:
            self._answering_since = time.monotonic()

    def _start_worker(self, stack: Stack) -> None:
        model = ["--model", self._task.model] if self._task.model else []
        arguments = [*model, "--shutdown-timeout", str(_SHUTDOWN_SECONDS), *self._task.worker_arguments]
        stack.start_workers(arguments, self._task.replicas)

    def _counts(self, record: BatchRecord) -> Counts:
        note = ""
        if record.ended:
            return counts_of(record)
        if record.state == "validating":
            note = "checking the input"
        elif record.state == "finalizing" or record.completed + record.failed == record.total:
            note = "writing the results"
        elif not record.running:
            note = "waiting for the model to load" if self._task.starts_worker else "waiting for a worker"
        return counts_of(record, note)

    def _farewell(self, batch_id: str) -> str:
        if self._task.redis_url is None:
            return _FAREWELL
        return f"Interrupted: the fleet goes on with {batch_id}; `pipeline wait {batch_id}` or the same command comes back for the results."

    def _wind_up(self, ended: bool, stack: Stack, signals: Signals, progress: Progress) -> None:
        """Lets the worker end, then the control plane, which keeps what is finished; a second order to stop ends everything at once."""

        def insisted() -> bool:
            return signals.stops > 1

        if ended and self._task.redis_url is None:
            stack.kill()
            return
        if signals.stops:
            progress.say("stopping; once more to stop at once")
        stack.stop(insisted=insisted)

    def _conclude(self, record: BatchRecord) -> None:
        now = time.monotonic()
        print_summary(Summary(record=record, seconds=now - self._began, answering=now - (self._answering_since or now)))
        if record.state != "completed":
            raise Unfinished(f"the batch was {record.state} before it was finished")
        if record.failed and self._task.fail_on_error:
            raise Unfinished(f"{record.failed} of {record.total} requests failed")


def check_input(source: Path) -> None:
    """Raises `Refused` unless there is a file that can be read."""
    try:
        if source.is_dir():
            raise Refused(f"the input {source} is a folder")
        source.open("rb").close()
    except FileNotFoundError:
        raise Refused(f"there is no file {source}") from None
    except OSError as error:
        raise Refused(f"the input {source} cannot be read: {error.strerror}") from None


@contextlib.contextmanager
def alone(root: Path) -> Iterator[None]:
    """Keeps every other run away from the folder while this process lives. Raises `Refused`."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = os.open(root / ".run", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise
        raise Refused(f"cannot make the folder {root}: {error.strerror}") from None
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(f"another run is at work on {root}: wait for it, or stop it") from None
        yield
    finally:
        os.close(lock)


def check_output(output: Path, source: Path) -> None:
    """Raises `Refused` if the output is a folder or the input; the rest is found out when the batch is made."""
    if output.is_dir():
        raise Refused(f"the output {output} is a folder")
    if output.exists() and output.samefile(source):
        raise Refused(f"the output {output} is the input itself")


def start_over_if_removed(root: Path) -> None:
    """A finished run whose output somebody removed is not brought back from its parts: it is run anew."""
    manifest = load_manifest(str(root))
    if manifest is not None and manifest.state == "completed" and manifest.output and not Path(manifest.output).exists():
        log.info("%s is gone since it was finished: starting over", manifest.output)
        shutil.rmtree(root)


def count_of(errors: list[Any]) -> str:
    """How many bad lines were found, in words."""
    return f"{len(errors)} bad line{'s' if len(errors) != 1 else ''}" if errors and errors[0].line else "it cannot be used"


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """Turns what stands in the way into the command's end."""
    try:
        yield
    except BatchRefused as error:
        raise Refused(str(error)) from None
    except ChildFailed as error:
        raise error.as_exit() from None
    except (StoreError, Busy, ServerError) as error:
        raise Unfinished(str(error)) from None
    except QueueUnavailable as error:
        raise Unfinished(f"{one_line(error)}; {_RESUMES}") from None
