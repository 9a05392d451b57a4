"""`python -m jobs.control.ticker [--redis-url URL]`: the clock of the control plane.

Any number may run; one leads, the others wait for its place.

The leader ends expired leases, hands RQ a slice for each batch that has something to do, and gives
the jobs of batches without a heartbeat to another process under a new generation. With
`--file-store` it rebuilds what a server that was restarted or emptied has lost, and removes the
files and batches whose time is over.
"""

import argparse
import contextlib
import logging
import secrets
import signal
import threading
import time
from types import FrameType
from typing import Any, NamedTuple

import redis

from jobs.batch.ending import clean_up
from jobs.batch.rebuild import rebuild_all, unknown_folders
from jobs.batch.retention import forget_output, remove_ended
from jobs.control.advance import needs_slice
from jobs.control.runner import Runner
from jobs.control.slices import STALE_SECONDS
from jobs.errors import JobsError
from jobs.process import add_redis_url, configure_logs, die_with_parent
from jobs.protocol.states import END_STATES, JOBS, MAY_EXPIRE, JobName
from jobs.queue import keys
from jobs.queue.batch_fields import BatchStatus
from jobs.queue.connection import check_server, connect
from jobs.queue.request_queue import Queue
from jobs.queue.scripts import QueueUnavailable, is_full
from jobs.queue.streams import FIRST_ID
from jobs.queue.tasks import Execution, enqueue, executions, forget_execution, is_waiting, job_id, waiting_jobs
from jobs.server import ServerError
from jobs.store.file_store import FileStore
from jobs.store.storage import StoreError

TICK_SECONDS = 1.0
LEAD_SECONDS = 3.0
SWEEP_SECONDS = 60.0
MOMENT_SECONDS = 0.5
"""What a tick gives each thing that takes the longer the more batches and files there are: leases
and slices cannot wait for all of it.
"""

_FIRST_RETRY_SECONDS = 0.02
_LONGEST_RETRY_SECONDS = 0.25
_stopping = threading.Event()
logger = logging.getLogger(__name__)


def main() -> None:
    """Run until SIGTERM or SIGINT, through outages of Redis."""
    parser = argparse.ArgumentParser(prog="python -m jobs.control.ticker", description="Keeps the control plane going.")
    add_redis_url(parser)
    parser.add_argument("--file-store", help="folder from which an empty Redis is rebuilt")
    options = parser.parse_args()
    die_with_parent()
    configure_logs("ticker")
    client = connect(options.redis_url)
    ticker = Ticker(Queue(client), options.file_store)
    with contextlib.suppress(_Stopped):
        signal.signal(signal.SIGTERM, _stop)
        signal.signal(signal.SIGINT, _stop)
        while not _stopping.is_set():
            try:
                check_server(client)
                ticker.run()
            except (redis.RedisError, QueueUnavailable, ServerError) as error:
                logger.warning("Redis unavailable or full; the ticker goes on when it answers: %s", error)
                if is_full(error):
                    ticker.make_room()
                time.sleep(TICK_SECONDS / 2)
    ticker.resign()


class _Retry(NamedTuple):
    """When to ask for a batch's slice again (monotonic seconds), and how long was waited for
    that.
    """

    when: float
    pause: float


class Ticker:
    """One contender for the lead."""

    def __init__(self, queue: Queue, file_store: str | None = None) -> None:
        self._queue = queue
        self._client = queue.redis
        self._files = None if file_store is None else FileStore(queue, file_store, forget_output)
        self._next_sweep = 0.0  # monotonic seconds
        self._ticking = False
        self._reaped_at = 0.0  # monotonic seconds
        self._emptied = threading.Event()  # Redis lacked what each reaping notes
        self._token = secrets.token_hex(16)
        self._last_id = FIRST_ID
        self._silent: set[str] = set()  # batches whose job had no heartbeat at this tick
        self._silent_before: set[str] = set()  # the same of the tick before
        self._orphans: dict[
            Execution, float
        ] = {}  # what RQ takes for running and no batch waits for, since when (monotonic seconds)
        # Run id of the server that was looked at since it was restarted or emptied
        self._server: Any = None
        self._seen = ""  # the last batch that the tick before had time for
        # Folders of batches that may lack a record, to be looked into
        self._unknown: list[str] = []
        self._unlisted: list[str] = []  # files to be listed again
        # Batches whose slice runs just now and that need another
        self._pending: dict[str, _Retry] = {}

    def run(self) -> None:
        """Lead whenever it can, until the process is ordered to end."""
        ended = threading.Event()
        threading.Thread(target=self._reap_in_slow_ticks, args=(ended,), name="reap", daemon=True).start()
        try:
            while not _stopping.is_set():
                if not self.lead():
                    time.sleep(TICK_SECONDS)
                    continue
                self.tick()
                self.listen(TICK_SECONDS)
        finally:
            ended.set()

    def lead(self) -> bool:
        """Take or keep the lead.

        Two leaders for a moment do no harm: all that they do may be done twice.
        """
        lifetime = int(LEAD_SECONDS * 1000)
        if self._client.set(keys.LEADER, self._token, nx=True, px=lifetime):
            return True
        if self._client.get(keys.LEADER) != self._token.encode():
            if int(self._client.pttl(keys.LEADER)) > lifetime:  # the server's clock was set back
                self._client.pexpire(keys.LEADER, lifetime)
            return False
        self._client.pexpire(keys.LEADER, lifetime)
        return True

    def resign(self) -> None:
        """Let another lead at once."""
        try:
            if self._client.get(keys.LEADER) == self._token.encode():
                self._client.delete(keys.LEADER)
        except redis.RedisError:
            logger.debug("Redis unavailable; the leader lock expires by itself")

    def tick(self) -> None:
        """What is due once a second."""
        self._ticking = True
        try:
            self._tick()
        finally:
            self._ticking = False

    def _tick(self) -> None:
        self._reap()
        if self._emptied.is_set():
            self._emptied.clear()
            self._server = None
        if self._files is not None:
            self._restore(self._files)
        now = self._queue.now()
        self._look_after_all(now)
        if self._files is not None and time.monotonic() >= self._next_sweep:
            self._next_sweep = time.monotonic() + SWEEP_SECONDS
            self._sweep(self._files, now)

    def _reap(self) -> None:
        self._reaped_at = time.monotonic()
        if not self._client.exists(keys.TICK):
            self._emptied.set()
        requeued = self._queue.reap()
        if requeued:
            logger.info("requeued or ended %d requests whose leases expired", requeued)

    def _reap_in_slow_ticks(self, ended: threading.Event) -> None:
        """Keep the lead and end leases while a tick takes long: a pause would look as if the server
        had been away, after which nothing is reaped for one lease.
        """
        while not ended.wait(max(0.1, self._reaped_at + 1.5 * TICK_SECONDS - time.monotonic())):
            if self._ticking and time.monotonic() - self._reaped_at > TICK_SECONDS:
                with contextlib.suppress(redis.RedisError, QueueUnavailable):  # the tick meets it too
                    if self.lead():
                        self._reap()

    def make_room(self) -> None:
        """A server without memory takes no jobs for RQ, and so the finished lines that fill it are
        drained here.
        """
        try:
            Runner(self._queue).flush()
        except (redis.RedisError, QueueUnavailable) as error:
            logger.warning("failed to drain finished lines from a full Redis: %s", error)

    def listen(self, seconds: float) -> None:
        """Hands out slices for `seconds`, as soon as claims and commits ask for them."""
        deadline = time.monotonic() + seconds
        while (left := deadline - (now := time.monotonic())) > 0:
            wait = min([left, *(max(0.001, retry.when - now) for retry in self._pending.values())])
            messages = self._queue.control_messages(keys.JOBS_CONTROL, self._last_id, wait)
            if messages:
                self._last_id = messages[-1].id
            for batch in {message.batch for message in messages if message.kind == "batch"}:
                self._slice(batch)
            now = time.monotonic()
            for batch, retry in list(self._pending.items()):
                if retry.when <= now:
                    self._slice(batch, min(2 * retry.pause, _LONGEST_RETRY_SECONDS))

    def _slice(self, batch: str, pause: float = _FIRST_RETRY_SECONDS) -> None:
        """Enqueue a slice; while one runs that does not end, retry after ever longer pauses."""
        self._pending.pop(batch, None)
        fields = self._queue.batch_fields(batch)
        if fields.state != "in_progress":
            return
        generation = fields.generation
        enqueued = enqueue(self._queue.rq, "advance", batch, generation)
        if not enqueued and not is_waiting(self._queue.rq, "advance", batch, generation):
            self._pending[batch] = _Retry(time.monotonic() + pause, pause)

    def _look_after_all(self, now: float) -> None:
        """Go on at the next tick where a moment was not enough: thousands of windows may close at
        once.
        """
        waiting, records = waiting_jobs(self._queue.rq), self._queue.active_batches()
        self._forget_orphans(records)
        deadline = time.monotonic() + MOMENT_SECONDS
        batches = sorted(records, key=lambda batch: (batch <= self._seen, batch))
        self._silent_before, self._silent, self._seen = self._silent, set(), ""
        for place, batch in enumerate(batches, 1):
            self._look_after(batch, records[batch], now, waiting)
            if place < len(batches) and time.monotonic() >= deadline:
                self._silent |= self._silent_before.intersection(batches[place:])
                self._seen = batch
                break

    def _forget_orphans(self, records: dict[str, BatchStatus]) -> None:
        """Remove what RQ keeps of jobs whose process was killed, some seconds after their batch
        moved on without them.
        """
        now, running, wanted = time.monotonic(), executions(self._queue.rq), set[str]()
        for batch, fields in records.items() if running else ():
            job = JOBS.get(fields.state)
            wanted |= {job_id(job, batch, fields.generation)} if job is not None else set()
        self._orphans = {one: self._orphans.get(one, now) for one in running if one.job not in wanted}
        for one, since in self._orphans.items():
            if now - since > STALE_SECONDS:
                forget_execution(self._queue.rq, one)

    def _look_after(self, batch: str, fields: BatchStatus, now: float, waiting: set[str]) -> None:
        if fields.state in END_STATES:
            clean_up(self._queue, batch)
        job = JOBS.get(fields.state)
        if job is None:
            return
        if now > fields.expires_at and self._expire(batch, fields):
            return
        if job_id(job, batch, fields.generation) in waiting:
            return
        if job == "advance":
            if not needs_slice(self._queue, batch, fields):
                return
            self._slice(batch)
        # One of the future is from before the clock of Redis was set back
        if abs(now - fields.heartbeat / 1000) > STALE_SECONDS:
            self._revive(batch, fields, job)

    def _revive(self, batch: str, fields: BatchStatus, job: JobName) -> None:
        """Run the batch's job again, under a new generation if a process took the last one with it.

        That is so if the job neither waits nor sends a heartbeat at two ticks in a row; at one,
        it may have begun just now.
        """
        generation, state = fields.generation, fields.state
        if enqueue(self._queue.rq, job, batch, generation) or is_waiting(self._queue.rq, job, batch, generation):
            return
        if batch not in self._silent_before:
            self._silent.add(batch)
            return
        if self._queue.transition(batch, [state], state, {"generation": generation + 1}, generation):
            logger.warning("batch %s: no heartbeat in state %s; running its job again", batch, state)
            enqueue(self._queue.rq, job, batch, generation + 1)

    def _expire(self, batch: str, fields: BatchStatus) -> bool:
        """End a batch whose completion window has passed; finished lines stay, the rest get error
        lines.
        """
        moved = {"outcome": "expired", "timestamps": {"finalizing": time.time()}}
        if not self._queue.transition(batch, MAY_EXPIRE, "finalizing", moved):
            return False
        logger.info("batch %s: its completion window has ended; finalizing it", batch)
        self._queue.remove_unfinished(batch)
        enqueue(self._queue.rq, "finalize", batch, fields.generation)
        return True

    def _sweep(self, files: FileStore, now: float) -> None:
        # Removal is final, so what is removed must have expired by the clock of this machine too
        now = min(now, time.time())
        try:
            swept = files.sweep(now, MOMENT_SECONDS)
            ended = remove_ended(self._queue, str(files.root), now, MOMENT_SECONDS)
            # Also those of processes that were killed before they wrote the record in Redis
            self._unknown = unknown_folders(self._queue, str(files.root))
        except StoreError as error:
            logger.error("failed to remove expired files; retrying in %d s: %s", SWEEP_SECONDS, error)
            return
        if swept or ended:
            logger.info("removed %d expired files and %d expired batches", swept, ended)

    def _restore(self, files: FileStore) -> None:
        """Bring back what Redis has lost, a moment's work of it at each tick."""
        server = self._client.hget(keys.TICK, "run_id")
        try:
            if server != self._server or self._unknown or self._unlisted:
                files.check()
            if server != self._server:
                self._unknown, self._unlisted = unknown_folders(self._queue, str(files.root)), files.names()
                self._server = server
            count, self._unknown = rebuild_all(self._queue, str(files.root), self._unknown, MOMENT_SECONDS)
            self._unlisted = files.reindex(self._unlisted, MOMENT_SECONDS)
        except StoreError as error:
            logger.error("failed to restore batches and files that Redis lost; retrying: %s", error)
            return
        if count:
            logger.warning("rebuilt %d batches that were missing from Redis", count)


class _Stopped(JobsError):
    """A signal asked for the end."""


def _stop(signum: int, frame: FrameType | None) -> Any:
    _stopping.set()  # also seen where the exception is swallowed, as in a destructor of redis-py
    raise _Stopped


if __name__ == "__main__":
    main()
