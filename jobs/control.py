"""What the control plane's jobs share: how one is enqueued, and the hold that a slice has on its
batch while it runs.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import redis
import rq.executions
from rq import Queue as JobQueue
from rq.exceptions import DuplicateJobError, InvalidJobOperation, NoSuchJobError
from rq.job import Job, JobStatus
from rq.registry import StartedJobRegistry
from rq.serializers import JSONSerializer

from jobs import keys
from jobs.connection import connect
from jobs.files import InputError
from jobs.manifest import END_STATES, Manifest, State, end_fields, is_marked_cancelled, load_manifest, save_manifest
from jobs.queue import Queue
from jobs.retention import tidy
from jobs.scripts import QueueUnavailable
from jobs.storage import Busy, StoreError, exclusive, sweep

JobName = Literal["validate", "advance", "finalize"]
QUEUES: dict[JobName, str] = {"validate": "bulk", "advance": "advance", "finalize": "bulk"}

BEAT_SECONDS = 1.0
"""Between two signs of life of a job."""

CANCELLABLE: tuple[State, ...] = ("validating", "in_progress", "finalizing")

STALE_SECONDS = 5.0
"""Without a heartbeat for this long, the job of a batch is taken for dead."""

_FAILURE_TTL = 3600
_PATIENCE_SECONDS = 2 * BEAT_SECONDS  # in which a job that lost its batch lets go of the folder
log = logging.getLogger(__name__)


class Superseded(Exception):
    """The batch moved on under another job, or to another state; what this one does no longer
    counts.
    """


class Stopping(Exception):
    """This process ends; the ticker has the job run elsewhere."""


stopping = threading.Event()
"""Set when the process was told to end."""


def enqueue(client: redis.Redis, job: JobName, batch: str, generation: int) -> bool:
    """Hands a job to RQ, once: False if this generation's is waiting or running already."""
    queue = JobQueue(QUEUES[job], connection=client, serializer=JSONSerializer)
    name = job_id(job, batch, generation)
    for _ in range(2):
        try:
            queue.enqueue_call(
                f"jobs.{job}.run",
                args=(batch, generation),
                job_id=name,
                timeout=-1,
                result_ttl=0,
                failure_ttl=_FAILURE_TTL,
                unique=True,
            )
            return True
        except DuplicateJobError:
            if not _removed_if_failed(client, name):
                return False
    return False


def _removed_if_failed(client: redis.Redis, name: str) -> bool:
    """RQ keeps a failed job, which would bar the next one of its id; so would what RQ noted of one
    that Redis had forgotten.
    """
    try:
        found = Job.fetch(name, connection=client, serializer=JSONSerializer)
        if found.get_status(refresh=False) not in (JobStatus.FAILED, JobStatus.STOPPED, JobStatus.CANCELED):
            return False
        _delete(found)
    except (NoSuchJobError, InvalidJobOperation):  # it ended meanwhile, or was forgotten
        client.unlink(Job.key_for(name))
    return True


def job_id(job: JobName, batch: str, generation: int) -> str:
    """The id that RQ knows the job by."""
    return f"{job}-{batch}-{generation}"


def is_waiting(client: redis.Redis, job: JobName, batch: str, generation: int) -> bool:
    """Whether the job stands in its queue and will run when a process is free."""
    try:
        found = Job.fetch(job_id(job, batch, generation), connection=client, serializer=JSONSerializer)
    except NoSuchJobError:
        return False
    queue = JobQueue(QUEUES[job], connection=client, serializer=JSONSerializer)
    return found.get_status(refresh=False) == JobStatus.QUEUED and queue.get_job_position(found.id) is not None


def waiting_jobs(client: redis.Redis) -> set[str]:
    """The ids of all jobs that stand in a queue, for who would have to ask `is_waiting` often."""
    queues = (JobQueue(name, connection=client, serializer=JSONSerializer) for name in set(QUEUES.values()))
    return {job for queue in queues for job in queue.get_job_ids()}


class Execution(NamedTuple):
    """A job that RQ takes for running, and which of its runs that is."""

    queue: str
    job: str
    run: str


def executions(client: redis.Redis) -> set[Execution]:
    """What RQ takes for running: also what ran in processes that were killed, which it would keep
    for over an hour.
    """
    queues = set(QUEUES.values())
    return {
        Execution(queue, *ids)
        for queue in queues
        for ids in _started(client, queue).get_job_and_execution_ids(cleanup=False)
    }


def forget_execution(client: redis.Redis, execution: Execution) -> None:
    """Leaves nothing in RQ of a job that its batch went on without; a process that still runs it
    gets on (`rq_worker`).
    """
    with contextlib.suppress(NoSuchJobError):
        _delete(Job.fetch(execution.job, connection=client, serializer=JSONSerializer))
    client.unlink(rq.executions.Execution(execution.run, execution.job, connection=client).key)
    client.zrem(
        _started(client, execution.queue).key, f"{execution.job}:{execution.run}"
    )  # also where RQ's job is gone already


def _delete(job: Job) -> None:
    """RQ reads all runs of a job first, and fails at one that is named still and gone already: so
    what names them goes before.
    """
    job.connection.unlink(job.execution_registry.key)
    job.delete()


def _started(client: redis.Redis, queue: str) -> StartedJobRegistry:
    return StartedJobRegistry(queue, connection=client, serializer=JSONSerializer)


def wake(client: redis.Redis, batch: str) -> None:
    """Asks the ticker for another slice of the batch, as a claim that runs its ready list low
    does.
    """
    client.xadd(keys.control(keys.JOBS_CONTROL), {"k": "batch", "v": batch, "s": 0}, maxlen=1000, approximate=True)


_process_queue: Queue | None = None
_slots: threading.Semaphore | None = None


def use_server(url: str) -> None:
    """Names the server that this process' jobs work on."""
    global _process_queue
    _process_queue = Queue(connect(url))


def process_queue() -> Queue:
    """The queue of the process, for the functions that RQ calls."""
    assert _process_queue is not None, "use_server was not called"
    return _process_queue


class Slice:
    """A job's hold on one batch.

    Nobody else works on its folder; `beat` says when the state or the generation moved on under it.
    """

    def __init__(self, queue: Queue, batch: str, generation: int, fields: dict[str, str], manifest: Manifest) -> None:
        self.queue = queue
        self.batch = batch
        self.generation = generation
        self.fields = fields
        self.manifest = manifest
        self._lost = False
        self._transitions = threading.Lock()
        self._ended = threading.Event()

    @property
    def root(self) -> str:
        """The batch's folder."""
        return self.manifest.spec.root

    @property
    def state(self) -> str:
        """The state in Redis, as this job knows it."""
        return self.fields["state"]

    def beat(self) -> None:
        """Cheap, to be called often.

        Raises `Superseded`, or `Stopping` when the process was told to end.
        """
        if self._lost:
            raise Superseded(self.batch)
        if stopping.is_set():
            raise Stopping

    def record(self) -> dict[str, str]:
        """The record as it is now. Raises `Superseded`, also where Redis came back without it."""
        fields = self.queue.batch_fields(self.batch)
        if (fields.get("state"), fields.get("generation")) != (self.state, str(self.generation)):
            self._lost = True
            raise Superseded(self.batch)
        return fields

    def note(self, fields: dict[str, Any]) -> None:
        """Sets fields of the record, which is also a sign of life. Raises `Superseded`."""
        self._transition(None, fields)

    def move(self, state: State, fields: dict[str, Any]) -> None:
        """Moves the state, in the manifest and then in Redis. Raises `Superseded`."""
        self._enter(state)
        self._tell_state(fields)

    def end(self, state: State) -> None:
        """Moves to an end state, and leaves nothing of the batch in Redis but its record."""
        self._enter(state)
        self._tell_end()

    def end_again(self) -> None:
        """Brings Redis to the end that the manifest names: it lost that, or was never told.

        Nothing is left to be done, nor the means for it. One that was cancelled since has ended so,
        with the results that it has.
        """
        if self.manifest.state != "cancelled" and (self.state == "cancelling" or is_marked_cancelled(self.root)):
            if "cancelling_at" in self.fields:
                self.manifest.timestamps["cancelling"] = float(self.fields["cancelling_at"])
            self.manifest.end_cancelled()
            save_manifest(self.manifest)
        self.queue.cancel_batch(self.batch)  # lines that Redis takes for unfinished again
        self.note({"result_bytes": 0})  # of results that go with the end
        self._tell_end()

    def keep_beating(self) -> None:
        """Gives a sign of life each second, however long one step of the job takes; the body of a
        thread.
        """
        while not self._ended.wait(BEAT_SECONDS):
            with contextlib.suppress(Superseded, QueueUnavailable, redis.RedisError):
                self._transition(None, {})

    def release(self) -> None:
        """Ends the signs of life."""
        self._ended.set()

    def _enter(self, state: State) -> None:
        self.note({})
        self.manifest.enter(state)
        save_manifest(self.manifest)

    def _tell_end(self) -> None:
        self._tell_state(end_fields(self.manifest))
        clean_up(self.queue, self.batch)

    def _tell_state(self, fields: dict[str, Any]) -> None:
        state = self.manifest.state
        self._transition(state, {f"{state}_at": self.manifest.timestamps[state], "problem": "", **fields})

    def _transition(self, state: str | None, fields: dict[str, Any]) -> None:
        with self._transitions:
            known = self.state
            if not self.queue.transition(self.batch, [known], state or known, fields, self.generation):
                self._lost = True
                raise Superseded(self.batch)
            self.fields |= {name: str(value) for name, value in fields.items()} | {"state": state or known}


def begin_cancel(queue: Queue, batch: str, generation: int) -> bool:
    """Moves a batch to `cancelling`; False if it moved on meanwhile.

    The generation rises, so that a job which writes the results of a finished batch just now gives
    way to one of the cancelled one.
    """
    changes = {"cancelling_at": time.time(), "generation": generation + 1}
    if not queue.transition(batch, CANCELLABLE, "cancelling", changes, generation):
        return False
    queue.cancel_batch(batch)
    enqueue(queue.redis, "finalize", batch, generation + 1)
    return True


def clean_up(queue: Queue, batch: str) -> None:
    """Leaves nothing of a batch that ended in Redis but its record, for some days; of the folder of
    one that came through the API, little.

    Does nothing while it runs, or is just begun again.
    """
    with queue.redis.pipeline() as pipeline, contextlib.suppress(redis.WatchError):
        pipeline.watch(keys.batch(batch))  # type: ignore[no-untyped-call]
        record: Any = pipeline.hmget(keys.batch(batch), "state", "root", "tenant")
        state, root, tenant = (value.decode() if value is not None else "" for value in record)
        if state not in END_STATES:
            return
        if root:
            tidy(root)
        pipeline.multi()
        pipeline.srem(keys.ACTIVE, batch)
        pipeline.srem(keys.open_batches(tenant), batch)
        pipeline.expire(keys.batch(batch), queue.settings.ended_batch_seconds)
        names = (keys.bodies, keys.results, keys.done, keys.parts, keys.batch_models)
        pipeline.unlink(*(name(batch) for name in names))
        pipeline.execute()


@contextlib.contextmanager
def hold(queue: Queue, batch: str, generation: int, states: tuple[State, ...], patience: float) -> Iterator[Slice]:
    """The hold of one job.

    Raises `Superseded` if the batch is not in one of `states` and `generation`, or in another's
    hands.

    So it is too where another start, with another server, took the folder over: its manifest names
    that server's record.
    """
    fields = queue.batch_fields(batch)
    if fields.get("state") not in states or fields.get("generation") != str(generation):
        raise Superseded(batch)
    with exclusive(fields["root"], patience):
        manifest = load_manifest(fields["root"])
        if manifest is None:
            raise StoreError(f"the manifest of {batch} is gone from {fields['root']}")
        if manifest.batch_id != batch or manifest.owner != fields.get("owner", "") or manifest.generation > generation:
            raise Superseded(batch)
        if manifest.generation < generation:
            manifest.generation = generation
            save_manifest(manifest)
        sweep(fields["root"])
        held = Slice(queue, batch, generation, fields, manifest)
        held.note({})
        heart = threading.Thread(target=held.keep_beating, name=f"beat-{batch}", daemon=True)
        heart.start()
        try:
            yield held
        finally:
            held.release()
            heart.join()


def use_threads(count: int) -> None:
    """Lets this process run as many long jobs side by side, so that a small batch does not wait for
    a large one to be read or written.
    """
    global _slots
    _slots = threading.Semaphore(count)


def run_long(
    queue: Queue, batch: str, generation: int, states: tuple[State, ...], work: Callable[[Slice], None]
) -> None:
    """As `run_slice`, but after `use_threads` in a thread of its own; waits for a free one.

    RQ takes such a job for done when it has begun; the batch's heartbeat says that it is alive.
    """
    slots = _slots
    if slots is None:
        run_slice(queue, batch, generation, states, work, _PATIENCE_SECONDS)
        return

    def run() -> None:
        try:
            run_slice(queue, batch, generation, states, work, _PATIENCE_SECONDS)
        finally:
            slots.release()

    slots.acquire()
    threading.Thread(target=run, name=batch).start()


def run_slice(
    queue: Queue,
    batch: str,
    generation: int,
    states: tuple[State, ...],
    work: Callable[[Slice], None],
    patience: float = 0.0,
) -> None:
    """Runs `work` under `hold`.

    A failure that a person can mend becomes the record's `problem`; the ticker has the job run
    again.

    It raises nothing, so that RQ takes the job for done and never keeps a failed one, whose id
    would bar the next.
    """
    try:
        _run(queue, batch, generation, states, work, patience)
    except (QueueUnavailable, redis.RedisError) as error:
        log.warning("%s: Redis cannot be used: %s", batch, error)


def _run(
    queue: Queue, batch: str, generation: int, states: tuple[State, ...], work: Callable[[Slice], None], patience: float
) -> None:
    try:
        with hold(queue, batch, generation, states, patience) as held:
            if held.manifest.state in END_STATES:
                held.end_again()
            elif held.state in CANCELLABLE and is_marked_cancelled(held.root):  # Redis lost it, or was never told
                begin_cancel(queue, batch, generation)
                return
            else:
                work(held)
            if held.fields.get("problem"):
                held.note({"problem": ""})
    except (Superseded, Stopping, Busy):
        log.debug("%s is in other hands, or this process stops", batch)
    except (StoreError, InputError) as error:
        log.error("%s: %s", batch, error)
        note_problem(queue, batch, str(error))
    except (QueueUnavailable, redis.RedisError):
        raise
    except Exception as error:
        log.exception("%s", batch)
        note_problem(queue, batch, f"internal error: {error!r}")


def note_problem(queue: Queue, batch: str, problem: str) -> None:
    """Shows in the record why the batch does not get on."""
    state = queue.batch_fields(batch).get("state")
    if state is not None:
        queue.transition(batch, [state], state, {"problem": problem})
