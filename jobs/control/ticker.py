"""`python -m jobs.control.ticker [--redis-url URL]`: the clock of the control plane.

Any number may run; one leads, the others are on standby. The leader ends expired leases and
completion windows, finds batches that may miss theirs (`deadlines`), and gives the batches of dead
processes to others under a new generation. With `--file-store` it also maintains the files
(`upkeep`).
"""

import argparse
import contextlib
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Container
from dataclasses import replace
from itertools import islice
from types import FrameType
from typing import Any

import msgspec
import redis

from jobs.control.deadlines import Deadlines
from jobs.control.driver import ALIVE_SECONDS
from jobs.control.rounds import Rounds
from jobs.control.runner import Runner
from jobs.control.upkeep import Upkeep
from jobs.errors import SettingsError
from jobs.process import (
    STOP_SIGNALS,
    add_redis_url,
    configure_logs,
    die_with_parent,
    drop_lost_exits,
    ignore_stop_signals,
    raise_open_files,
)
from jobs.protocol.states import END_STATES, JOBS, MAY_EXPIRE
from jobs.queue import keys
from jobs.queue.batch_fields import BatchStatus
from jobs.queue.connection import check_server, connect
from jobs.queue.lease import Lease
from jobs.queue.outage_log import OutageLog
from jobs.queue.request_queue import Queue
from jobs.queue.scripts import QueueUnavailable, is_full
from jobs.queue.settings import QueueSettings
from jobs.queue.tasks import (
    Execution,
    ask_for_process,
    executions,
    forget_execution,
    hand_out,
    wake,
)
from jobs.server import ServerError
from jobs.store.owner import HEARTBEAT_SECONDS

TICK_SECONDS = 1.0
_LOOK_BATCHES = 200  # of one tick
LEAD_SECONDS = 3.0
_SECRET_SECONDS = 30.0  # between checks for the secret of webhooks
GONE_SECONDS = 2.5
"""A driver whose key is missing for this long is dead."""
STALE_SECONDS = 5.0
"""A job that RQ lists as running for this long ran in a process that was killed."""
MOMENT_SECONDS = 0.5
"""Time per tick for all batches together: leases cannot wait for thousands of them."""

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
    raise_open_files()
    drop_lost_exits()
    client = connect(options.redis_url)
    queue = Queue(client)
    ticker = Ticker(queue, options.file_store)
    if options.file_store:
        _start_webhooks(ticker, options.redis_url, options.file_store, queue.settings)
    ticker.start()  # before the handlers are set: `Thread.start` breaks if one raises in it
    code = 1
    try:
        _run_until_stopped(ticker, client)
        code = 0
    except Exception:
        logger.exception("internal error; the ticker exits")
    finally:
        os._exit(code)  # the interpreter would wait for threads, and a look-up of the receiver's name may hang


def _run_until_stopped(ticker: "Ticker", client: redis.Redis) -> None:
    with contextlib.suppress(SystemExit):
        for number in STOP_SIGNALS:
            signal.signal(number, _stop)
        while not _stopping.is_set():
            try:
                check_server(client)
                ticker.run()
            except (redis.RedisError, QueueUnavailable, ServerError) as error:
                ticker.outage.failed(error)
                if is_full(error):
                    ticker.make_room()
                time.sleep(TICK_SECONDS / 2)
    ticker.resign()


def _start_webhooks(ticker: "Ticker", redis_url: str, file_store: str, settings: QueueSettings) -> None:
    """Deliver webhooks while the ticker leads, if they are configured."""
    if settings.webhook_url is not None:
        arguments = (ticker, redis_url, file_store, settings, settings.webhook_url)
        threading.Thread(target=_deliver_webhooks, args=arguments, daemon=True).start()


def _deliver_webhooks(ticker: "Ticker", redis_url: str, file_store: str, settings: QueueSettings, url: str) -> None:
    from jobs.control.webhooks import Webhooks  # imports an HTTP client

    while not _stopping.is_set():
        try:
            key = settings.webhook_key()
        except SettingsError as error:  # the file of the secret is gone since the start
            logger.error("webhook delivery paused: %s", error)
            _stopping.wait(_SECRET_SECONDS)
            continue
        if key is not None:
            queue = Queue(connect(redis_url), replace(settings, redis_retry_seconds=0.0))  # it retries by itself
            Webhooks(queue, file_store, url, key).run(ticker.leads, _stopping)


class Ticker:
    """One candidate for the lead."""

    def __init__(self, queue: Queue, file_store: str | None = None) -> None:
        self.upkeep = Upkeep(queue, file_store)
        self.outage = OutageLog(logger, "the ticker waits until it answers", "the ticker goes on")
        self._queue = queue
        self._client = queue.redis
        self._deadlines = Deadlines(queue)
        self._leads = False
        self._upkeep_due = threading.Event()
        self._upkeep_thread = threading.Thread(target=self._run_upkeep, daemon=True)
        self._lead = Lease(queue.redis, keys.LEADER)
        self._gone: dict[str, float] = {}  # drivers without a key, since when (monotonic seconds)
        self._orphans: dict[Execution, float] = {}  # jobs that RQ lists as running, since when (monotonic seconds)
        self._seen = ""  # the last batch that the previous tick handled
        self._rounds = Rounds(queue, _LOOK_BATCHES)
        self._records: dict[str, BatchStatus] = {}  # of active batches, as of the last look at each

    def leads(self) -> bool:
        """Return whether this ticker leads now."""
        return self._leads

    def start(self) -> None:
        """Start the threads that maintain the file store."""
        self._upkeep_thread.start()
        threading.Thread(target=self._renew_owner, daemon=True).start()

    def run(self) -> None:
        """Lead whenever possible, until the process is ordered to end. Raise what redis-py
        raises.
        """
        try:
            while not _stopping.is_set():
                self._leads = self.lead()
                if self._leads:
                    self.tick()
                self.outage.worked()
                time.sleep(TICK_SECONDS)  # not the event's wait, whose lock may be held as the handler sets it
        finally:
            self._leads = False

    def lead(self) -> bool:
        """Take or keep the lead.

        Two leaders for a moment do no harm: all their work may be done twice.
        """
        return self._lead.take(LEAD_SECONDS)

    def resign(self) -> None:
        """Release the lead at once."""
        self._lead.end()

    def tick(self) -> None:
        """Do the work due once a second: end leases, and make sure that each batch has a driver."""
        requeued = self._queue.reap()
        if requeued:
            logger.info("requeued or ended %d requests whose leases expired", requeued)
        self._look_after_all()

    def make_room(self) -> None:
        """Drain finished lines from a full Redis.

        A full server accepts no RQ jobs, so the lines that fill it are drained here.
        """
        try:
            Runner(self._queue, stopping=_stopping, outage=self.outage).flush()
        except (redis.RedisError, QueueUnavailable) as error:
            self.outage.failed(error)

    def _run_upkeep(self) -> None:
        while not _stopping.is_set():
            self._upkeep_due.wait()
            self._upkeep_due.clear()
            _attempt(self.upkeep.run_once)

    def _renew_owner(self) -> None:
        """Renew the owner, also while another ticker leads.

        This ticker can then use the store as soon as it leads.
        """
        while not _stopping.wait(HEARTBEAT_SECONDS):
            _attempt(self.upkeep.renew_owner)

    def _look_after_all(self) -> None:
        """Check batches, continuing at the next tick after a moment: thousands of windows may end
        at once.
        """
        waits, notes = self._queue.commands(
            [("EXISTS", keys.WAITING_BATCHES), ("HMGET", keys.TICK, "run_id", "restored")]
        )
        if waits:
            ask_for_process(self._queue)
        look = self._rounds.look(set(self._records))
        for batch in look.gone:
            del self._records[batch]
        self._records.update(look.records)
        self.upkeep.ended = [batch for batch, fields in look.records.items() if fields.state in END_STATES]
        if self.upkeep.is_due(*notes):
            self._upkeep_due.set()
        self._tidy_rq()
        self._look_for_drivers(self._records)
        now = self._queue.now() if self._records else 0.0
        self._judge(now)
        deadline = time.monotonic() + MOMENT_SECONDS
        records = {**look.records, **self._queue.statuses(self._due(look.records, now))}
        self._records.update(records)
        waiting = self._waiting(records)
        batches = sorted(records, key=lambda batch: (batch <= self._seen, batch))
        self._seen = ""
        for place, batch in enumerate(batches, 1):
            self._look_after(batch, records[batch], now, batch in waiting)
            if place < len(batches) and time.monotonic() >= deadline:
                self._seen = batch
                break

    def _judge(self, now: float) -> None:
        for batch, risk in self._deadlines.judge(self._records, now).items():
            self._records[batch] = msgspec.structs.replace(self._records[batch], risk=risk)

    def _due(self, looked: Container[str], now: float) -> list[str]:
        """Return some batches beside those just read whose window or driver has ended."""
        due = (batch for batch, fields in self._records.items() if batch not in looked and self._is_due(fields, now))
        return list(islice(due, _LOOK_BATCHES))

    def _is_due(self, fields: BatchStatus, now: float) -> bool:
        return fields.state in JOBS and (self._is_expired(fields, now) or self._is_dead(fields.driver))

    def _is_expired(self, fields: BatchStatus, now: float) -> bool:
        return fields.state in MAY_EXPIRE and now > fields.expires_at

    def _is_dead(self, driver: str) -> bool:
        return time.monotonic() - self._gone.get(driver, math.inf) > GONE_SECONDS

    def _waiting(self, batches: Collection[str]) -> set[str]:
        """Return those of these batches that no process has claimed yet."""
        [scores] = self._queue.commands([("ZMSCORE", keys.WAITING_BATCHES, *batches)]) if batches else [[]]
        return {batch for batch, score in zip(batches, scores, strict=True) if score is not None}

    def _look_for_drivers(self, records: dict[str, BatchStatus]) -> None:
        """Record since when drivers have no key: a live one sets it again within a second.

        A key with too long a lifetime is from before the clock of Redis was set back.
        """
        now, named = time.monotonic(), sorted({fields.driver for fields in records.values()} - {""})
        left = self._queue.commands(("TTL", keys.driver(driver)) for driver in named)
        gone = (driver for driver, seconds in zip(named, left, strict=True) if not 0 <= seconds <= ALIVE_SECONDS)
        self._gone = {driver: self._gone.get(driver, now) for driver in gone}

    def _tidy_rq(self) -> None:
        """Remove RQ's records of jobs whose process was killed: a job takes no time."""
        now = time.monotonic()
        self._orphans = {one: self._orphans.get(one, now) for one in executions(self._queue.rq)}
        for one, since in self._orphans.items():
            if now - since > STALE_SECONDS:
                forget_execution(self._queue.rq, one)

    def _look_after(self, batch: str, fields: BatchStatus, now: float, is_waiting: bool) -> None:
        if fields.state not in JOBS:
            return
        if self._is_expired(fields, now) and self._expire(batch):
            return
        if fields.driver:
            if self._is_dead(fields.driver):
                self._take_from_dead(batch, fields)
        elif not is_waiting:
            hand_out(self._queue, batch)

    def _take_from_dead(self, batch: str, fields: BatchStatus) -> None:
        """Dispatch a batch under a new generation, which a driver that is alive after all does not
        have.
        """
        changes = {"generation": fields.generation + 1, "driver": ""}
        if self._queue.transition(batch, [fields.state], fields.state, changes, fields.generation):
            logger.warning("batch %s in state %s moves to another process: its driver is gone", batch, fields.state)
            hand_out(self._queue, batch)

    def _expire(self, batch: str) -> bool:
        """End a batch whose completion window has passed.

        Finished lines stay, the others get error lines.
        """
        moved = {"outcome": "expired", "timestamps": {"finalizing": time.time()}}
        if not self._queue.transition(batch, MAY_EXPIRE, "finalizing", moved):
            return False
        logger.info("batch %s: its completion window has ended; finalizing it", batch)
        self._queue.remove_unfinished(batch)
        wake(self._client, batch)
        return True


def _attempt(upkeep: Callable[[], object]) -> None:
    try:
        upkeep()
    except (redis.RedisError, QueueUnavailable) as error:
        logger.debug("Redis unavailable; the upkeep resumes when it answers: %s", error)
    except Exception:
        logger.exception("internal error of the upkeep; retrying")


def _stop(signum: int, frame: FrameType | None) -> Any:
    ignore_stop_signals()
    _stopping.set()  # also set if the exception is swallowed, for example in a destructor of redis-py
    raise SystemExit  # is not taken for a failure of the current batch


if __name__ == "__main__":
    main()
