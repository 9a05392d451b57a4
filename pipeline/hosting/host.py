"""Loading and unloading of models on demand.

A model is loaded when work for it waits and there is memory. It is unloaded when it has been idle
for long enough, or when another model needs its memory.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from jobs.queue.on_demand import OnDemandModel
from pipeline.errors import ChildFailed, Refused
from pipeline.hosting.models import ServedModel
from pipeline.hosting.needs import Needs, needs_of
from pipeline.hosting.room import Room
from pipeline.hosting.settings import HostingSettings
from pipeline.hosting.usage import memory_of
from pipeline.hosting.work_watch import ModelToWatch, ModelWork, WorkWatch
from workers.engine.messages.config import CPU_CACHE_BYTES, CPU_CACHE_SHARE
from workers.errors import WorkerError

if TYPE_CHECKING:
    from jobs.protocol.default_parameters import DefaultParameters
    from pipeline.child import Child
    from pipeline.supervisor import Supervisor

TURN_SECONDS = 60.0
"""Least time that a busy model stays loaded while work for another model waits."""

_LOADS_A_TURN = 5  # a busy model stays loaded at least this many times its load time
_REPORT_SECONDS = 5.0  # interval of the workers' reports
_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 60.0  # after a model could not be loaded
_LOADS_ALLOWED = 4  # worker processes that may end while one model is loaded
_BESIDES = 10.0  # seconds to stop, in addition to the shutdown timeout
_CHECK_SECONDS = 5.0
_SOON_SECONDS = 0.2

State = Literal["unloaded", "loading", "ready", "unloading"]


@dataclass(eq=False)
class ModelPlace:
    """One model, its worker processes and the known state of its work."""

    model: ServedModel
    needs: Needs
    state: State = "unloaded"
    since: float = 0.0  # start of the state
    children: "list[Child]" = field(default_factory=list)
    pids: set[int] = field(default_factory=set)
    work: ModelWork = field(default_factory=ModelWork)
    waits_since: float | None = None  # when work began to wait
    worked_at: float = 0.0
    load_seconds: float = 0.0
    problem: str = ""  # why the model is not loaded although work waits
    failure: str = ""  # error of the last attempt to load the model
    refusal: Literal["", "memory", "failed"] = ""
    failures: int = 0  # in a row
    defaults: "DefaultParameters | None" = None  # of the model for calls, if known
    retry_at: float = 0.0

    @property
    def is_idle(self) -> bool:
        """Return whether the model has no work."""
        return self.state == "ready" and not self.work.waiting and not self.work.running

    def gives_way(self, now: float) -> bool:
        """Return whether the model may be unloaded for another one."""
        turn = max(TURN_SECONDS, _LOADS_A_TURN * self.load_seconds)
        return self.is_idle or (self.state == "ready" and now - self.since > turn)

    def enter(self, state: State, now: float) -> None:
        self.state, self.since = state, now


class ModelHost:
    """A context in which models are offered; `check` loads and unloads them.

    Call `check` again when `news` is readable.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        settings: HostingSettings,
        supervisor: "Supervisor",
        say: Callable[[str], None],
    ) -> None:
        self._room = Room(settings.max_memory)
        self._most_cache = most_cache_bytes(models, self._room)
        self._places = [ModelPlace(model, self._needs(model), defaults=_defaults(model)) for model in models]
        self._idle_unload = math.inf if settings.idle_unload is None else settings.idle_unload
        self._supervisor = supervisor
        self._say = say
        self._watch = WorkWatch(supervisor.queue)
        self.news = self._watch.news

    def __enter__(self) -> "ModelHost":
        self._watch.start(self._watched())
        return self

    def __exit__(self, *error: object) -> None:
        self._watch.stop()

    @property
    def problem(self) -> str:
        """Return the reason why a model with waiting work cannot be loaded, or ""."""
        refused = (place for place in self._places if place.refusal)
        return next((f"the model {one.model.title} {one.problem or one.failure}" for one in refused), "")

    def check(self) -> float:
        """Load and unload models; return the most seconds until the next call."""
        now, look = time.monotonic(), self._watch.take()
        for place in self._places:
            if look.began > place.since:
                self._observe(place, look.works[place.model.title], now)
        for place in self._places:
            if place.state == "unloading":
                self._end_unloading(place, now)
            elif place.is_idle and now - place.worked_at > self._idle_unload + _REPORT_SECONDS:
                self._unload(place, now, f"after {self._idle_unload:g} s without work")
        self._load_wanted(now)
        self._watch.unsettled = self._is_changing
        self._watch.tell(self._watched())
        leaving = any(place.state == "unloading" for place in self._places)
        return _SOON_SECONDS if leaving else _CHECK_SECONDS

    def _observe(self, place: ModelPlace, work: ModelWork, now: float) -> None:
        if work.waiting or work.running or work.counted != place.work.counted:
            place.worked_at = now
        place.work = work
        if not work.waiting:
            place.waits_since = None
        elif place.waits_since is None:
            place.waits_since = now
        if place.refusal and now >= place.retry_at:
            place.refusal = ""
        if not place.refusal and place.waits_since is None:
            place.problem = ""
        pids = {child.pid for child in place.children if child.pid is not None}
        if place.state == "loading" and work.ready:
            place.load_seconds, place.worked_at = now - place.since, now
            place.failures, place.failure = 0, ""
            place.enter("ready", now)
        elif place.state == "loading" and len(place.pids | pids) > _LOADS_ALLOWED * place.model.replicas:
            self._fail(place, ChildFailed(f"its worker ended {_LOADS_ALLOWED} times while it was loaded"))
        place.pids |= pids

    def _load_wanted(self, now: float) -> None:
        """Load models with waiting work, those with live calls first.

        Other models are unloaded for one model at a time.
        """
        wanted = [
            place
            for place in self._places
            if place.state == "unloaded" and place.waits_since is not None and now >= place.retry_at
        ]
        for place in self._taken() if wanted else ():
            place.needs = _measured(place)
        for place in sorted(wanted, key=lambda one: (not one.work.live, one.waits_since)):
            place.needs = self._needs(place.model)  # a model of the hub may have been downloaded
            place.problem = self._shortage(place)
            if not place.problem:
                self._load(place, now)
            elif self._is_changing:  # the free memory is not known yet
                return
            elif never := self._shortage(place, leaving=self._taken()):
                self._refuse(place, never, now)
            elif self._makes_room(place, now):
                return

    def _needs(self, model: ServedModel) -> Needs:
        return _needs(model, self._most_cache)

    def _makes_room(self, place: ModelPlace, now: float) -> bool:
        """Unload models to make room for a model, the longest idle first.

        Return whether there will be room.
        """
        leaving: list[ModelPlace] = []
        for other in sorted(self._taken(), key=lambda one: (not one.is_idle, one.worked_at)):
            if other.gives_way(now):
                leaving.append(other)
                if not self._shortage(place, leaving):
                    for one in leaving:
                        self._unload(one, now, f"to make room for {place.model.title}")
                    return True
        others = ", ".join(f"`{one.model.title}`" for one in self._taken())
        place.problem = f"{place.problem} beside {others}, which is at work"
        return False

    @property
    def _is_changing(self) -> bool:
        return any(place.state in ("loading", "unloading") for place in self._places)

    def _taken(self) -> list[ModelPlace]:
        return [place for place in self._places if place.state != "unloaded"]

    def _shortage(self, place: ModelPlace, leaving: Iterable[ModelPlace] = ()) -> str:
        taken = self._taken()
        return self._room.shortage(
            place.needs,
            loaded=[one.needs for one in taken if one.state != "loading"],
            starting=[one.needs for one in taken if one.state == "loading"],
            leaving=[one.needs for one in leaving],
        )

    def _load(self, place: ModelPlace, now: float) -> None:
        title = place.model.title
        self._say(f"loading the model {title}, for which work waits")
        place.pids.clear()
        place.enter("loading", now)
        arguments = place.model.sized(self._most_cache).arguments
        place.children = self._supervisor.start_workers(
            arguments, place.model.replicas, title, partial(self._fail, place)
        )

    def _unload(self, place: ModelPlace, now: float, reason: str) -> None:
        self._say(f"unloading the model {place.model.title} {reason}")
        for child in place.children:
            child.ask_to_stop()
        place.enter("unloading", now)

    def _end_unloading(self, place: ModelPlace, now: float) -> None:
        if now - place.since > place.model.settings.shutdown_timeout + _BESIDES:
            for child in place.children:
                child.kill()
        if all(child.has_stopped for child in place.children):
            self._supervisor.forget(place.children)
            place.children = []
            place.enter("unloaded", now)

    def _fail(self, place: ModelPlace, error: ChildFailed) -> None:
        """End all workers of a model that could not be loaded; try again after a growing pause."""
        now = time.monotonic()
        for child in place.children:
            child.kill()
        place.enter("unloading", now)
        place.failure, place.problem = f"could not be loaded: {error.message}", ""
        pause = self._postpone(place, "failed", now)
        self._say(f"the model {place.model.title} {place.failure}; not trying again for {pause:g} s")

    def _refuse(self, place: ModelPlace, shortage: str, now: float) -> None:
        place.problem = shortage
        pause = self._postpone(place, "memory", now)
        self._say(f"the model {place.model.title} {shortage}; not trying again for {pause:g} s")

    def _postpone(self, place: ModelPlace, refusal: Literal["memory", "failed"], now: float) -> float:
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0**place.failures)
        place.refusal, place.failures, place.retry_at = refusal, place.failures + 1, now + pause
        return pause

    def _watched(self) -> dict[str, ModelToWatch]:
        return {
            place.model.title: ModelToWatch(
                tuple(place.model.names),
                OnDemandModel(self._watch.server, place.problem, place.failure, place.refusal, defaults=place.defaults),
                frozenset(place.pids),
                tuple(place.model.settings.aliases),
            )
            for place in self._places
        }


def most_cache_bytes(models: Sequence[ServedModel], room: Room) -> int:
    """Return the most bytes for the KV cache of a replica on a CPU, unless its flags set a size.

    All caches together take the same share of the memory left by the models as the cache of a
    single model. Each may take at least CPU_CACHE_BYTES, so with many models only a few can be
    loaded at once.
    """
    if room.memory is None:
        return CPU_CACHE_BYTES
    left = room.memory - sum(_needs(model, 0).memory for model in models)
    return max(CPU_CACHE_BYTES, int(CPU_CACHE_SHARE * left) // sum(model.replicas for model in models))


def check_fits(models: Sequence[ServedModel], settings: HostingSettings) -> None:
    """Raise `Refused` for a model that does not fit on this machine even alone."""
    room = Room(settings.max_memory)
    most_cache = most_cache_bytes(models, room)
    for model in models:
        if shortage := room.shortage(_needs(model, most_cache), (), (), ()):
            raise Refused(f"the model {model.title} {shortage}: free some, raise --max-memory, or leave the model out")


def sized_alone(model: ServedModel, settings: HostingSettings) -> ServedModel:
    """Return the model for a start without a host.

    The worker sizes its KV cache by the free memory, unless `max_memory` limits it.
    """
    if settings.max_memory is None:
        return model
    return model.sized(most_cache_bytes([model], Room(settings.max_memory)))


def fit_together(models: Sequence[ServedModel], settings: HostingSettings) -> bool:
    """Return whether there is room for all models at once."""
    room = Room(settings.max_memory)
    most_cache = most_cache_bytes(models, room)
    first, *others = (_needs(model, most_cache) for model in models)
    return not room.shortage(first, loaded=(), starting=others, leaving=())


def _measured(place: ModelPlace) -> Needs:
    if place.state != "ready" or place.needs.gpus:  # host memory of a GPU driver says nothing about GPU memory
        return place.needs
    return replace(place.needs, used=memory_of(child.pid for child in place.children if child.pid is not None))


def _defaults(model: ServedModel) -> "DefaultParameters | None":
    """Return the model's defaults; None if they are not known, or wrong, as its worker will say."""
    from workers.default_parameters import local_defaults

    with contextlib.suppress(WorkerError):
        return local_defaults(model.settings)
    return None


def _needs(model: ServedModel, most_cache: int) -> Needs:
    return needs_of(model.settings.engine, model.replicas, most_cache)
