"""The models that can be called now or soon, by the queue's registry."""

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import anyio
import redis

from api.tasks import start, within
from api.threads import run_in
from jobs.protocol import fields
from jobs.protocol.endpoint import Endpoint
from jobs.protocol.endpoints import check_answers
from jobs.protocol.results import ApiError
from jobs.queue.connection import twin
from jobs.queue.on_demand import OnDemandModel
from jobs.queue.registry import ModelRecord, WorkerRecord
from jobs.queue.request_queue import Queue
from jobs.queue.scripts import QueueUnavailable

T = TypeVar("T")

_FRESH_SECONDS = 1.0
"""Seconds for which one reading, or its failure, is the answer for all."""

_RETRY_SECONDS = 0.2  # of a reading; a second try serves a connection that Redis has closed
_PROBE_SECONDS = 2.0  # also of a connection on which nothing arrives any more


@dataclass(frozen=True)
class Snapshot:
    """One reading of the registry."""

    workers: list[WorkerRecord]
    models: dict[str, ModelRecord]
    expected: Sequence[str] = ()
    on_demand: Mapping[str, OnDemandModel] = field(default_factory=dict)  # loaded when a call waits
    # Models of earlier readings, if Redis may have come back empty since
    missed: frozenset[str] = frozenset()
    # Why the last worker of a model could not load it
    failures: Mapping[str, str] = field(default_factory=dict)
    write_fault: str | None = None  # why Redis writes nothing

    def names(self, *states: str) -> set[str]:
        """Return the models of workers in one of `states`."""
        return {name for worker in self.workers if worker.state in states for name in worker.models}

    def tasks(self, model: str) -> list[set[str]]:
        """Return the tasks of a model's workers that take calls now."""
        return [set(one.tasks) for one in self.workers if model in one.models and one.state == "ready"]

    def was_served(self, model: str) -> bool:
        """Return whether a worker serves the model, or did, even before Redis came back empty."""
        return model in self.models or model in self.missed

    def listed(self, names: Iterable[str]) -> list[str]:
        """Return the names without aliases, which are other names of the same models, sorted."""
        aliases = {name for worker in self.workers for name in worker.aliases}
        aliases.update(name for name, offer in self.on_demand.items() if offer.alias)
        return sorted(set(names) - aliases)

    @property
    def served(self) -> list[ModelRecord]:
        """Return the models that a worker answers for now, by name."""
        return [self.models[name] for name in sorted(self.names("ready")) if name in self.models]

    @property
    def loading(self) -> list[str]:
        """Return the models that no worker answers for yet, by name."""
        coming = self.names("loading", "initializing") | (set(self.expected) - set(self.on_demand))
        refused = {name for name, offer in self.on_demand.items() if offer.refusal}
        return sorted(coming - self.names("ready") - refused)

    @property
    def callable_names(self) -> list[str]:
        """Return the models that can be called now, or are loaded for a call, each by one name."""
        return self.listed([*(record.name for record in self.served), *self.on_demand])


class Fleet:
    """The registry, read at most once a second by one thread; waiting calls share a reading.

    A reading hardly retries. While Redis is away, calls wait without a thread or a lock. After as
    long as one call retries, all of them are refused; later calls wait for one reading.
    """

    def __init__(self, queue: Queue, expected: Sequence[str] = (), load_timeout: float = 300.0) -> None:
        """`expected` are models that count as loading while no worker has registered them.

        Calls wait for `load_timeout` seconds for a model that is loaded on demand, be it named in
        the settings or offered by a server.
        """
        self.load_timeout = load_timeout
        self.short_retry_queue = Queue(queue.redis, replace(queue.settings, redis_retry_seconds=_RETRY_SECONDS))
        client = twin(queue.redis, socket_timeout=_PROBE_SECONDS, socket_connect_timeout=_PROBE_SECONDS)
        self.probe_queue = Queue(client, self.short_retry_queue.settings)
        self._timeout = max(queue.settings.redis_retry_seconds, _FRESH_SECONDS)
        self._expected = expected
        self._seen: frozenset[str] = frozenset()  # models of all readings
        self._on_demand = dict.fromkeys(queue.settings.on_demand_models, OnDemandModel(server=""))
        self._thread = ThreadPoolExecutor(1, "registry")
        self._reading: asyncio.Future[Snapshot] | None = None
        self._began = self._ended = -math.inf
        self._watched = 0  # number of calls in `unless_away`
        self._watch: asyncio.Future[None] | None = None
        # Start of the latest failed readings in a row
        self._away_since = math.inf

    def close(self) -> None:
        """Close what the readings use."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self.short_retry_queue.close()
        self.probe_queue.close()
        self.probe_queue.redis.close()

    async def snapshot(self, fresh: bool = False) -> Snapshot:
        """Return what is served; `fresh` reads anew.

        Raise `QueueUnavailable` once Redis has been away for longer than one call retries.
        """
        now = asyncio.get_running_loop().time()
        if not fresh and self._reading is not None and self._began >= now - _FRESH_SECONDS and self._is_read:
            return self._reading.result()
        try:
            return await within(
                self._read_until_it_works(fresh), max(self._away_from(now) + self._timeout - now, _PROBE_SECONDS)
            )
        except TimeoutError:
            raise QueueUnavailable(f"the registry could not be read for {self._timeout:g} s") from None

    async def _read_until_it_works(self, fresh: bool) -> Snapshot:
        while True:
            with contextlib.suppress(QueueUnavailable):
                return await self._shared(fresh)
            await asyncio.sleep(self._began + _FRESH_SECONDS - asyncio.get_running_loop().time())

    async def unless_away(self, work: Awaitable[T]) -> T:
        """Return the result of `work`, which asks Redis, unless Redis stays away.

        Raise `QueueUnavailable`, at once for all waiting calls, when Redis is away for longer than
        one call retries. A call that waits for a thread is dropped; a call in a thread goes on and
        keeps it.
        """
        scope = anyio.CancelScope()  # a thread of the framework outlasts that, and not `Task.cancel`
        task = start(_within(scope, work))
        self._watched += 1
        if self._watch is None or self._watch.done():
            self._watch = start(self._until_away())
        try:
            both: list[asyncio.Future[Any]] = [task, self._watch]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise QueueUnavailable("Redis went away during the call")
        finally:
            self._watched -= 1
            scope.cancel()

    async def _until_away(self) -> None:
        with contextlib.suppress(QueueUnavailable, redis.RedisError):
            await asyncio.sleep(_FRESH_SECONDS / 2)
            while self._watched:
                await self.snapshot()
                await asyncio.sleep(_FRESH_SECONDS / 2)

    async def probe(self) -> Snapshot:
        """Return what is served, for probes. Raise `QueueUnavailable` after `_PROBE_SECONDS`."""
        try:
            return await within(self._shared(fresh=False), _PROBE_SECONDS)
        except TimeoutError:
            raise QueueUnavailable("Redis does not answer") from None

    async def require(
        self, model: str, fresh: bool = False, endpoint: Endpoint | None = None, waited: float = 0.0
    ) -> None:
        """Raise `ApiError` unless a worker serves the model.

        The status is 503 if a worker served the model or will, else 404; it is 400 if no worker of
        the model answers the endpoint, and 404 if only some do. A call may wait for a model that is
        loaded on demand: 503 if that is in vain, or if the call has `waited` for too many seconds.
        An error of a model that cannot be loaded is final.
        """
        snapshot = await self.snapshot(fresh)
        if model not in snapshot.names("ready") and not fresh:
            snapshot = await self.snapshot(fresh=True)
        if model not in snapshot.names("ready"):
            offer = snapshot.on_demand.get(model)
            if offer is None:
                raise not_served(model, snapshot)
            if offer.refusal or waited >= self.load_timeout:
                raise _not_loaded(model, offer, self.load_timeout, snapshot.failures.get(model, ""))
            return
        if endpoint is not None:
            tasks = snapshot.tasks(model)
            check_answers(model, set().union(*tasks), endpoint.url)
            if any(one.isdisjoint(endpoint.tasks) for one in tasks):
                raise _not_answered(model, endpoint.url)

    async def _shared(self, fresh: bool) -> Snapshot:
        """Return a reading that began within the last second or, if `fresh`, after this call.

        A failed reading counts for a second either way.
        """
        loop = asyncio.get_running_loop()
        earliest = loop.time() - (0 if fresh and not self._failed else _FRESH_SECONDS)
        while self._reading is None or self._began < earliest:
            if self._reading is not None and not self._reading.done():
                await asyncio.wait({self._reading})
                continue
            self._began = loop.time()
            self._away_since = self._away_from(self._began)
            self._reading = start(self._read())
        return await asyncio.shield(self._reading)

    def _away_from(self, now: float) -> float:
        """Return since when Redis has been away; `now` if it is not known to be.

        Old failed readings may belong to an outage that has ended.
        """
        reads = self._reading is not None and not self._reading.done()
        recent = reads or now - self._ended <= _FRESH_SECONDS + _PROBE_SECONDS
        return min(self._away_since, now) if recent else now

    @property
    def _is_read(self) -> bool:
        return self._reading is not None and self._reading.done() and self._reading.exception() is None

    @property
    def _failed(self) -> bool:
        reading = self._reading
        return reading is not None and reading.done() and reading.exception() is not None

    async def _read(self) -> Snapshot:
        try:
            snapshot = await run_in(self._thread, self._read_now)
        finally:
            self._ended = asyncio.get_running_loop().time()
        self._away_since = math.inf
        return snapshot

    def _read_now(self) -> Snapshot:
        models = {record.name: record for record in self.probe_queue.models()}
        on_demand = self._on_demand | self.probe_queue.on_demand()
        self._seen |= models.keys()
        missed = self._seen - models.keys()
        if missed and self.probe_queue.registry_age() > self.load_timeout:  # they were removed on purpose
            self._seen, missed = frozenset(models), frozenset()
        failures, fault = self.probe_queue.load_failures(), self.probe_queue.write_fault()
        return Snapshot(self.probe_queue.workers(), models, self._expected, on_demand, missed, failures, fault)


async def _within(scope: anyio.CancelScope, work: Awaitable[T]) -> T:
    with scope:
        return await work
    raise QueueUnavailable("Redis went away during the call")


def not_served(model: str, snapshot: Snapshot) -> ApiError:
    """Return the error of a model without a ready worker: 503 if it had or will get one, or 404."""
    if reason := snapshot.failures.get(model):
        return _not_loadable(model, reason, again=model in snapshot.names("loading", "initializing"))
    if model in snapshot.loading:
        return ApiError(
            503, f"The model `{model}` is still being loaded; try again.", "server_error", code="model_loading"
        )
    # No models at all but those of the settings: Redis is new, or has just come back empty
    offered = any(offer.server for offer in snapshot.on_demand.values())
    if snapshot.was_served(model) or not (snapshot.models or offered):
        return ApiError(
            503, f"No worker serves the model `{model}` at the moment; try again.", "server_error", code="no_worker"
        )
    return model_not_found(model, snapshot.callable_names)


def _not_loadable(model: str, reason: str, again: bool = False) -> ApiError:
    """Return the error of a model whose last worker could not load it; is it loaded `again`?"""
    why = f": {reason}." if reason else ", and the server's log says why."
    message = f"The model `{model}` could not be loaded{why}{' A worker is loading it again.' if again else ''}"
    return ApiError(503, message, "server_error", code="model_not_loadable", final=True)


def _not_loaded(model: str, offer: OnDemandModel, seconds: float, reason: str) -> ApiError:
    """Return the error of a model on demand that was not loaded for this call.

    `reason` is why its last worker could not load it, if known.
    """
    if offer.refusal == "failed":
        return _not_loadable(model, reason)
    if offer.refusal == "memory":
        message = f"The model `{model}` {offer.problem}."
        return ApiError(503, message, "server_error", code="insufficient_memory", final=True)
    code = "insufficient_memory" if offer.problem else "model_loading"
    problem = offer.problem or f"was not loaded within {seconds:g} s"
    return ApiError(503, f"The model `{model}` {problem}; try again.", "server_error", code=code)


def _not_answered(model: str, url: str) -> ApiError:
    """Return the error of an endpoint that not every worker of a model answers."""
    message = f"The model `{model}` cannot be used with {url}: some of its workers, of an older version, lack it."
    return ApiError(404, message, param="model", code="unsupported_endpoint")


def model_not_found(model: str, served: list[str]) -> ApiError:
    """Return the 404 that names the served models."""
    names = ", ".join(f"`{name}`" for name in served)
    rest = f"Served at the moment: {names}." if served else "No model is served at the moment."
    message = f"The model `{fields.shown(model)}` does not exist or is not served. {rest}"
    return ApiError(404, message, param="model", code="model_not_found")
