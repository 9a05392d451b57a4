"""The process that places as many workers as the queue needs, as Ray actors.

`pipeline fleet` runs it as a child, since Ray ends the process of a driver that loses the head.
"""

import logging
import math
import os
import re
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import ray
import redis
from ray.exceptions import ActorDiedError, RayActorError, RayError

from jobs.process import configure_logs
from jobs.queue import keys
from jobs.queue.connection import connect
from jobs.queue.lease import Lease
from jobs.queue.on_demand import OnDemandModel
from jobs.queue.request_queue import Queue
from jobs.queue.scripts import QueueUnavailable
from jobs.queue.settings import QueueSettings
from pipeline.errors import Refused, Unfinished, exit_code_of, one_line
from pipeline.ray.actor import ActorStatus, WorkerActor
from pipeline.ray.scale import Scale
from pipeline.ray.spec import SPEC_VARIABLE, FleetSpec, ModelSpec, decode_fleet
from pipeline.signals import Signals
from workers.engine.messages.config import CPU_SEQUENCES, GPU_SEQUENCES

logger = logging.getLogger("pipeline")

_POLL_SECONDS = 0.5
_OFFER_SECONDS = 5.0
_HEAD_SECONDS = 10.0  # the head may be silent for this long
_CONNECT_SECONDS = 2.0
_LEAD_SECONDS = 10.0
_COUNT_SECONDS = 1.0  # between counts of unfinished requests, while there are any
_ANSWER_SECONDS = 30.0  # a worker may be without a node, or not answer, for this long
_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 60.0  # after a worker failed
_MOST_FAILURES = 8  # failures that lengthen the pause


@dataclass(eq=False)
class PlacedModel:
    """A model, and the failures of its workers."""

    spec: ModelSpec
    packed: bytes  # encoded spec of its workers
    options: dict[str, Any]  # Ray resources of one worker
    scale: Scale
    digest: str  # digest of the spec
    failure: str = ""
    failures: int = 0  # successive rounds with a failed worker
    failed_at: float = -math.inf
    retry_at: float = -math.inf

    @property
    def needs(self) -> str:
        """The resources that a node must have, to follow "a Ray node"."""
        amounts = {"CPU": self.options["num_cpus"], "GPU": self.options["num_gpus"], **self.options["resources"]}
        shown = ", ".join(f"{amount:g} {name}" for name, amount in amounts.items() if amount)
        return f" with {shown} free" if shown else ""

    def fail(self, reason: str, placed_at: float, now: float) -> float | None:
        """Record the failure of a worker; return the seconds until another is placed.

        Return None if another worker of the same round failed before: a round counts once.
        """
        self.failure = reason
        if now - self.retry_at > _LONGEST_PAUSE:
            self.failures = 0
        elif placed_at <= self.failed_at:
            return None
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0**self.failures)
        self.failures = min(self.failures + 1, _MOST_FAILURES)
        self.failed_at, self.retry_at = now, now + pause
        return pause


@dataclass(eq=False)
class WorkerSlot:
    """One actor, by its name."""

    model: PlacedModel
    number: int
    actor: Any
    placed_at: float  # time of placement or adoption
    asked: Any  # reference to the requested status
    is_adopted: bool
    status: ActorStatus | None = None  # the last one; None before the first
    silent_since: float | None = None  # start of the time without a node or an answer
    leaving: bool = False
    is_late: bool = False  # silent for long, and logged

    @property
    def name(self) -> str:
        return f"{self.model.spec.title}/{self.number}"

    @property
    def may_be_busy(self) -> bool:
        """Whether the worker may have requests."""
        return self.is_adopted or self.status is not None

    def is_lost(self, now: float) -> bool:
        """Return whether the worker has been silent for too long to answer."""
        return self.silent_since is not None and now - self.silent_since > _ANSWER_SECONDS


class Placement:
    """Places, watches and drains the workers of all models until a stop signal.

    Only one process for each queue is the leader; the others wait.
    """

    def __init__(self, spec: FleetSpec, queue: Queue) -> None:
        self._queue = queue
        self._server = f"{socket.gethostname()}-{os.getpid()}"
        self._head = ray.get_runtime_context().gcs_address
        self._head_answered = time.monotonic()
        self._actors = ray.remote(WorkerActor)
        self._models = [_placed(model) for model in spec.models]
        self._slots: list[WorkerSlot] = []
        self._lead = Lease(queue.redis, keys.FLEET_LEADER)
        self._leads: bool | None = None  # None: it has not tried yet
        self._offered = self._counted = -math.inf
        self._unfinished: dict[str, int] = {}
        self._queue_away = False

    def run(self) -> None:
        """Run until a stop signal and the end of all workers. Raises `Unfinished`."""
        try:
            with Signals() as signals:
                while not signals.stops:
                    self.step(time.monotonic())
                    signals.wait(_POLL_SECONDS)
                if self._leads:
                    self._stop(signals)
        finally:
            self._lead.end()

    def step(self, now: float) -> None:
        """Observe and scale the workers, if this process is the leader."""
        if self._head_answers(now) and self._keep_lead():
            self._observe(now)
            self._scale(now)

    def _stop(self, signals: Signals) -> None:
        with suppress(QueueUnavailable, redis.RedisError):
            self._queue.withdraw(self._offers(time.monotonic()))
        while self._slots:
            now = time.monotonic()
            if self._head_answers(now):
                if not self._keep_lead():
                    raise Unfinished("another fleet process has taken over the workers before all had stopped")
                self._observe(now)
                for slot in self._slots:
                    self._drain(slot, "the fleet stops")
            signals.wait(_POLL_SECONDS)

    def _keep_lead(self) -> bool:
        """Return whether this process is the leader; a new leader adopts the workers."""
        try:
            leads = self._lead.take(_LEAD_SECONDS)
        except (redis.RedisError, QueueUnavailable) as error:
            self._miss_queue(error)
            return bool(self._leads)
        if leads and not self._leads:
            self._adopt()
        elif not leads and self._leads is not False:
            logger.info("another fleet process places the workers of this queue; this one waits for its end")
            self._slots.clear()
        self._leads = leads
        return leads

    def _head_answers(self, now: float) -> bool:
        """Return whether the Ray head answers; otherwise a call of Ray would block.

        Raises `Unfinished` if the head has been silent for too long.
        """
        host, _, port = self._head.rpartition(":")
        with suppress(OSError):
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
            self._head_answered = now
            return True
        if now - self._head_answered > _HEAD_SECONDS:
            raise Unfinished(
                f"the Ray head at {self._head} does not answer: workers on nodes that ended with it are gone, and their"
                " requests wait for other workers"
            )
        return False

    def _adopt(self) -> None:
        """Take over workers that an earlier process placed."""
        models = {model.spec.title: model for model in self._models}
        for name in ray.util.list_named_actors():
            title, _, number = name.rpartition("/")
            if title not in models or not number.isdecimal():
                continue
            with suppress(ValueError):  # it has ended meanwhile
                self._watch(models[title], int(number), ray.get_actor(name), is_adopted=True)
                logger.info("adopting the running worker %s", name)

    def _of(self, model: PlacedModel) -> list[WorkerSlot]:
        return [slot for slot in self._slots if slot.model is model and not slot.leaving]

    def _watch(self, model: PlacedModel, number: int, actor: Any, *, is_adopted: bool) -> None:
        now = time.monotonic()
        slot = WorkerSlot(model, number, actor, now, actor.status.remote(), is_adopted, silent_since=now)
        self._slots.append(slot)

    def _observe(self, now: float) -> None:
        asked = {slot.asked: slot for slot in self._slots}
        ready = ray.wait(list(asked), num_returns=len(asked), timeout=0)[0] if asked else []
        for slot in map(asked.__getitem__, ready):
            try:
                self._update(slot, ray.get(slot.asked), now)
            except ActorDiedError as error:
                self._end(slot, error, now)
                continue
            except RayActorError:  # the network failed, or Ray places the actor again
                if slot.silent_since is None:
                    logger.warning("the worker %s does not answer; Ray places it again if its node is lost", slot.name)
                    slot.silent_since, slot.is_late = now, False
            except RayError as error:
                self._fail(slot, _last_line(error), now)
            slot.asked = slot.actor.status.remote()
        for slot in self._slots:
            if slot.is_lost(now) and slot.leaving:
                self._kill(slot)
            elif slot.is_lost(now) and not slot.is_late:
                slot.is_late = True
                logger.warning("the worker %s has not started: it needs a Ray node%s", slot.name, slot.model.needs)

    def _update(self, slot: WorkerSlot, status: ActorStatus, now: float) -> None:
        is_first = slot.status is None
        if slot.status is None or slot.status.node != status.node:
            logger.info("the worker %s runs on node %s", slot.name, status.node)
        slot.status, slot.silent_since = status, None
        if status.failure and not slot.leaving and status.digest == slot.model.digest:
            self._fail(slot, f"on node {status.node}: {status.failure}", now)
        elif status.ended:
            self._kill(slot)
        elif status.draining:  # an earlier process may have drained it
            slot.leaving = True
        elif slot.leaving:  # Ray placed it again meanwhile
            slot.actor.drain.remote()
        elif status.digest != slot.model.digest:
            self._drain(slot, "its flags have changed")
        if is_first and slot.is_adopted:
            running = [one for one in self._of(slot.model) if one.status is not None]
            slot.model.scale.note(len(running), now)

    def _end(self, slot: WorkerSlot, error: ActorDiedError, now: float) -> None:
        """Remove an actor that Ray will not restart."""
        self._slots.remove(slot)
        if slot.leaving or (slot.is_adopted and slot.status is None):
            logger.info("the worker %s has stopped", slot.name)
        else:
            self._postpone(slot, _last_line(error), now)

    def _fail(self, slot: WorkerSlot, reason: str, now: float) -> None:
        self._postpone(slot, reason, now)
        self._kill(slot)

    def _postpone(self, slot: WorkerSlot, reason: str, now: float) -> None:
        pause = slot.model.fail(reason, slot.placed_at, now)
        then = "" if pause is None else f"; not placing another for {pause:g} s"
        logger.warning("the worker %s failed, %s%s", slot.name, reason, then)

    def _drain(self, slot: WorkerSlot, reason: str) -> None:
        if slot.leaving:
            return
        logger.info("stopping the worker %s: %s", slot.name, reason)
        if not slot.may_be_busy:
            self._kill(slot)
        else:
            slot.leaving = True
            slot.actor.drain.remote()

    def _kill(self, slot: WorkerSlot) -> None:
        """Kill the actor; the next status call reports its death."""
        slot.leaving = True
        ray.kill(slot.actor, no_restart=True)

    def _scale(self, now: float) -> None:
        try:
            if now - self._offered > _OFFER_SECONDS:
                self._queue.offer(self._offers(now), ())
                self._offered = now
            requests = self._requests(now)
        except (QueueUnavailable, redis.RedisError) as error:
            self._miss_queue(error)
            return
        self._queue_away = False
        for model in self._models:
            self._fit(model, requests[model.spec.title], now)

    def _miss_queue(self, error: Exception) -> None:
        if not self._queue_away:
            logger.warning("Redis unavailable; no worker is placed or stopped: %s", one_line(error))
        self._queue_away = True

    def _fit(self, model: PlacedModel, requests: int, now: float) -> None:
        slots = self._of(model)
        surplus = len(slots) - model.scale.target(requests, now)
        if surplus < 0 and now >= model.retry_at:
            taken = sum(slot.model is model for slot in self._slots)  # including draining ones
            for _ in range(min(-surplus, model.spec.max_workers - taken)):
                self._place(model, requests)
        if any(slot.is_adopted and slot.status is None and not slot.is_lost(now) for slot in slots):
            return  # it may be draining already
        # Workers without a node first, then the highest numbers
        for slot in sorted(slots, key=lambda one: (one.may_be_busy, -one.number))[: max(0, surplus)]:
            self._drain(slot, "fewer workers are enough")

    def _place(self, model: PlacedModel, requests: int) -> None:
        taken = {slot.number for slot in self._slots if slot.model is model}
        number = next(one for one in range(len(taken) + 1) if one not in taken)
        name = f"{model.spec.title}/{number}"
        logger.info("placing the worker %s for %d requests", name, requests)
        options = {"name": name, "get_if_exists": True, "lifetime": "detached", "max_restarts": -1, **model.options}
        actor = self._actors.options(scheduling_strategy="SPREAD", **options).remote(model.packed)
        self._watch(model, number, actor, is_adopted=False)

    def _requests(self, now: float) -> dict[str, int]:
        """Return how many requests wait or run for each model.

        The numbers include batch lines that are not in Redis yet.
        """
        workers = self._queue.workers()
        held = self._queue.held_by([worker.id for worker in workers])
        names = [name for model in self._models for name in model.spec.names]
        waits = {name: any(kinds) for name, kinds in self._queue.waiting_work(names).items()}
        if not any(waits.values()) and not any(held.values()):
            self._unfinished, self._counted = dict.fromkeys(names, 0), -math.inf
        elif now - self._counted > _COUNT_SECONDS:
            self._unfinished, self._counted = self._queue.unfinished(names), now
        return {
            model.spec.title: max(
                sum(max(self._unfinished[name], waits[name]) for name in model.spec.names),
                sum(held[worker.id] for worker in workers if set(worker.models) & set(model.spec.names)),
            )
            for model in self._models
        }

    def _offers(self, now: float) -> dict[str, OnDemandModel]:
        """Return the offers that let the API accept requests for models without a worker."""
        return {name: self._offer(model, name, now) for model in self._models for name in model.spec.names}

    def _offer(self, model: PlacedModel, name: str, now: float) -> OnDemandModel:
        alias = name in model.spec.aliases
        if now >= model.retry_at or any(slot.status is not None for slot in self._of(model)):
            return OnDemandModel(self._server, alias=alias)
        failure = f"could not be loaded: {model.failure}"
        return OnDemandModel(self._server, failure=failure, refusal="failed", alias=alias)


def main() -> None:
    """Place workers until a stop signal."""
    fleet = decode_fleet(os.environ[SPEC_VARIABLE])
    configure_logs("fleet", fleet.log_level)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - where Ray prints the end of each lost node's own log
    try:
        _connect(fleet)
        with connect(fleet.redis_url) as client:
            Placement(fleet, Queue(client, QueueSettings.from_environment())).run()
        code = 0
    except BaseException as error:
        code = exit_code_of(error)
    sys.stderr.flush()
    os._exit(code)  # Ray's shutdown would wait for a lost head


def _connect(fleet: FleetSpec) -> None:
    try:
        ray.init(fleet.address, namespace=fleet.namespace, log_to_driver=False, logging_level="ERROR")
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise Refused(
            f"no Ray cluster can be used at the address {fleet.address}: {re.split(r'[.:] ', one_line(error))[0]}"
        ) from None


def _placed(spec: ModelSpec) -> PlacedModel:
    has_gpus = "GPU" in ray.cluster_resources()
    gpus = (spec.worker.ranks if has_gpus else 0) if spec.worker.gpus is None else spec.worker.gpus
    options = {"num_cpus": spec.worker.cpus, "num_gpus": gpus, "resources": spec.worker.resources}
    worker = msgspec.structs.replace(spec.worker, gpus=gpus)
    each = spec.requests_per_worker or (GPU_SEQUENCES if gpus else CPU_SEQUENCES)
    scale = Scale(spec.min_workers, spec.max_workers, each, spec.quiet_seconds)
    return PlacedModel(spec, worker.packed(), options, scale, worker.digest())


def _last_line(error: Exception) -> str:
    return one_line([line for line in str(error).splitlines() if line.strip()][-1])


if __name__ == "__main__":
    main()
