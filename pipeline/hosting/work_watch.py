"""The amount of work that waits for the models of a server.

A separate thread reads it, so that an unavailable Redis does not block the server.
"""

import contextlib
import logging
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import redis

from jobs.host import WakeUp
from jobs.queue.connection import MAX_BLOCK_SECONDS
from jobs.queue.gauges import WorkerGauges
from jobs.queue.on_demand import OnDemandModel
from jobs.queue.registry import WorkerRecord
from jobs.queue.scripts import QueueUnavailable
from jobs.queue.streams import FIRST_ID

if TYPE_CHECKING:
    from jobs.queue.request_queue import Queue

logger = logging.getLogger("pipeline")

_UNSETTLED_SECONDS = 0.5  # between two reads while a model is loaded or unloaded
_PAUSE_AFTER_ERROR = 1.0


class ModelWork(NamedTuple):
    """The work for one model at one moment."""

    live: int = 0  # waiting live calls, or their tenants
    waiting: int = 0  # `live`, plus the same count for batches
    running: int = 0  # requests claimed by the model's workers
    counted: float = 0.0  # sum of the workers' counters
    ready: bool = False  # whether a worker is ready


@dataclass(frozen=True)
class ModelToWatch:
    """The names, offer and processes of a model."""

    names: tuple[str, ...]
    offer: OnDemandModel
    pids: frozenset[int] = frozenset()  # of its worker processes
    aliases: tuple[str, ...] = ()  # of its names


class Look(NamedTuple):
    """The work of all models, from one read."""

    began: float  # by the monotonic clock
    works: Mapping[str, ModelWork]


class WorkWatch:
    """Reads the waiting work every few seconds, and when work arrives for an unloaded model.

    `news` is readable after each read.
    """

    def __init__(self, queue: "Queue") -> None:
        self.server = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self.news = WakeUp()
        self.unsettled = False  # whether to read again soon
        self._queue = queue
        self._models: Mapping[str, ModelToWatch] = {}
        self._found = Look(-math.inf, {})
        self._waiting: frozenset[str] = frozenset()  # models with work but no worker at the last read
        self._stopped = threading.Event()
        self._offering = threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="work-watch", daemon=True)

    def start(self, models: Mapping[str, ModelToWatch]) -> None:
        self._models = models
        self._thread.start()

    def tell(self, models: Mapping[str, ModelToWatch]) -> None:
        """Replace the models for the next read."""
        self._models = models

    def take(self) -> Look:
        """Return the last read."""
        self.news.clear()
        return self._found

    def stop(self) -> None:
        """Withdraw the offers; the thread ends after its blocking read."""
        self._stopped.set()
        with self._offering, contextlib.suppress(redis.RedisError, QueueUnavailable):  # else they expire
            self._queue.withdraw(_offers(self._models.values()))

    def _watch(self) -> None:
        last_id = FIRST_ID
        while not self._stopped.is_set():
            try:
                orders = self._queue.control_messages(self.server, last_id, self.look())
                last_id = orders[-1].id if orders else last_id
            except Exception as error:
                if not self._stopped.is_set():
                    logger.warning("waiting work could not be read; models are neither loaded nor unloaded: %s", error)
                self._stopped.wait(_PAUSE_AFTER_ERROR)

    def look(self) -> float:
        """Read the waiting work once; return the seconds until the next read.

        New work for an unloaded model may trigger an earlier read.
        """
        began, models = time.monotonic(), self._models
        offers = _offers(models.values())
        # Models with waiting work are read again anyway; further work must not trigger more reads
        rings = [name for title, one in models.items() if title not in self._waiting for name in one.names]
        with self._offering:
            if self._stopped.is_set():
                return 0.0
            self._queue.offer(offers, rings)  # first, so that work after this read triggers another
        workers = self._queue.workers()
        waiting = self._queue.waiting_work(list(offers))
        # Read after `waiting`, so that work claimed meanwhile is counted twice, not missed
        held = self._queue.held_by([worker.id for worker in workers])
        gauges = self._queue.gauges([worker.id for worker in workers])
        works = {title: _work(model, workers, waiting, held, gauges) for title, model in models.items()}
        self._found = Look(began, works)
        self.news.ring()
        before, self._waiting = self._waiting, frozenset(_without_worker(works))
        if not self._waiting.issuperset(before):  # the work is gone, so new work must trigger again
            return 0.0
        is_loading = any(not models[title].offer.refusal for title in self._waiting)
        return _UNSETTLED_SECONDS if is_loading or self.unsettled else MAX_BLOCK_SECONDS


def _without_worker(works: Mapping[str, ModelWork]) -> Iterator[str]:
    return (title for title, work in works.items() if work.waiting and not work.ready)


def _offers(models: Collection[ModelToWatch]) -> dict[str, OnDemandModel]:
    return {name: msgspec.structs.replace(one.offer, alias=name in one.aliases) for one in models for name in one.names}


def _work(
    model: ModelToWatch,
    workers: Collection[WorkerRecord],
    waiting: Mapping[str, tuple[int, int]],
    held: Mapping[str, int],
    gauges: Mapping[str, WorkerGauges],
) -> ModelWork:
    own = [one for one in workers if one.pid in model.pids and one.host == socket.gethostname()]
    live = sum(waiting[name][0] for name in model.names)
    return ModelWork(
        live=live,
        waiting=live + sum(waiting[name][1] for name in model.names),
        running=sum(held[one.id] for one in own),
        counted=sum(_counted(one, gauges[one.id]) for one in own if one.id in gauges),
        ready=any(one.state == "ready" for one in own),
    )


def _counted(worker: WorkerRecord, gauges: WorkerGauges) -> float:
    """Return the sum of all counters of a worker."""
    metrics = zip(worker.metrics, gauges.metrics, strict=False)
    return sum(one.value for declared, samples in metrics if declared.kind != "gauge" for one in samples)
