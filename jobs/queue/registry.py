"""The registry of workers and models."""

import contextlib
import hashlib
import threading
from collections.abc import Iterable
from typing import Literal

import msgspec
import redis

from jobs.protocol.default_parameters import DefaultParameters
from jobs.protocol.endpoints import urls_for
from jobs.protocol.requests import pack
from jobs.queue import keys
from jobs.queue.base import QueueBase, text
from jobs.queue.gauges import MetricDescriptor
from jobs.queue.scripts import QueueFull, QueueUnavailable, passing_reason
from jobs.queue.settings import QueueSettings

WorkerState = Literal["loading", "initializing", "ready", "draining", "stopped"]

SERVING: tuple[WorkerState, ...] = ("loading", "initializing", "ready")
"""States of workers that serve their models, or will."""

_FAILURE_SECONDS = 24 * 3600
STOPPED_SECONDS = 10.0
"""How long a worker that shut down cleanly is still shown."""
_WRITTEN_SECONDS = 5


class EngineRecord(msgspec.Struct, frozen=True):
    """The device and limits with which a worker runs its model."""

    device: str  # "cpu", "cuda:0"
    dtype: str
    backend: str
    max_num_seqs: int  # sequences that run at once
    system_fingerprint: str


class WorkerRecord(msgspec.Struct):
    """One worker, as `pipeline status` shows it."""

    id: str  # no spaces; new for every process, since claim numbers are per process
    models: list[str]
    state: WorkerState
    max_model_len: int  # 0 while unknown
    started: float  # unix seconds
    host: str
    pid: int
    metrics: list[MetricDescriptor] = []  # the metrics of `WorkerGauges.metrics`, in that order
    tasks: tuple[str, ...] = ("generate",)  # of its models; newer versions may have others
    engine: EngineRecord | None = None  # None while unknown
    defaults: DefaultParameters | None = None  # of its models; None while unknown
    aliases: list[str] = []  # of its models; lists leave them out


class ModelRecord(msgspec.Struct):
    """A model that workers serve or served; outlives the last worker."""

    name: str
    max_model_len: int
    endpoints: list[str]  # urls
    created: float  # unix seconds
    tasks: tuple[str, ...]
    defaults: DefaultParameters = {}


_decode_worker = msgspec.msgpack.Decoder(WorkerRecord).decode
_decode_model = msgspec.msgpack.Decoder(ModelRecord).decode


class Registry(QueueBase):
    """Records of workers and models.

    A worker's record expires three leases after its last `renew`; a model's record does not expire.
    The next `renew` rewrites a record that was not written, or that Redis lost.
    """

    def __init__(self, client: redis.Redis, settings: QueueSettings | None = None) -> None:
        super().__init__(client, settings)
        self._records: dict[str, WorkerRecord] = {}
        self._digests: dict[str, str] = {}  # of the records as last written
        self._unwritten: set[str] = set()
        self._writing = threading.Lock()  # so that an older record never replaces a newer one

    def register_worker(self, record: WorkerRecord) -> None:
        """Write the record; if the worker is ready, also register its models and wake it for live
        calls.
        """
        if not record.id or " " in record.id:
            raise ValueError(f"not a worker id: {record.id!r}")
        with self._writing:
            self._records[record.id] = record
            self._write(record)

    def _write(self, record: WorkerRecord) -> None:
        self._unwritten.add(record.id)
        ready = record.state == "ready"
        urls = urls_for(record.tasks)
        about = urls, record.started, record.tasks, record.defaults or {}
        models = [ModelRecord(name, record.max_model_len, *about) for name in record.models]
        named = [value for model in models for value in (model.name, pack(model))]
        lasts = int(STOPPED_SECONDS * 1000) if record.state == "stopped" else 3 * self._lease_ms
        packed = pack(record)
        self._digests[record.id] = hashlib.sha1(packed, usedforsecurity=False).hexdigest()
        self._scripts.call("register", [record.id, lasts, packed, int(ready), *named])
        self._unwritten.discard(record.id)

    def workers(self) -> list[WorkerRecord]:
        """Return the workers that are alive, oldest first."""
        alive = self._command("ZRANGEBYSCORE", keys.ALIVE, int(self.now() * 1000), "+inf")
        packed = self._command("HMGET", keys.WORKERS, *alive) if alive else []
        records = [_decode_worker(value) for value in packed if value is not None]
        return sorted(records, key=lambda record: (record.started, record.id))

    def models(self) -> list[ModelRecord]:
        """Return the models that are or were served, by name."""
        packed = self._command("HVALS", keys.MODELS)
        return sorted(map(_decode_model, packed), key=lambda model: model.name)

    def note_load_failure(self, models: Iterable[str], reason: str) -> None:
        """Note why a worker could not load its models, but for those that another one has."""
        others = {name for worker in self.workers() if worker.state in SERVING for name in worker.models}
        failed = [part for name in models if name not in others for part in (name, reason)]
        if failed:
            self.commands([["HSET", keys.LOAD_FAILURES, *failed], ["EXPIRE", keys.LOAD_FAILURES, _FAILURE_SECONDS]])

    def load_failures(self) -> dict[str, str]:
        """Return why the last worker of a model could not load it, by model."""
        return {text(name): text(reason) for name, reason in self._command("HGETALL", keys.LOAD_FAILURES).items()}

    def registry_age(self) -> float:
        """Return the seconds since the first worker registered, or since the first call of this.

        The time restarts if Redis comes back empty: workers register again with their next renewal.
        """
        since = self._command("GET", keys.REGISTRY_SINCE)
        if since is not None:
            return max(0.0, self.now() - int(since) / 1000)
        with contextlib.suppress(QueueFull):
            self._command("SET", keys.REGISTRY_SINCE, int(self.now() * 1000), "NX")
        return 0.0

    def write_fault(self) -> str | None:
        """Return why Redis, which can be read, refuses to write; None if it writes."""
        try:
            self._command("SET", keys.WRITTEN, 1, "EX", _WRITTEN_SECONDS)
        except QueueUnavailable as error:
            if not isinstance(error.__cause__, redis.ResponseError):
                raise
            return passing_reason(error.__cause__)
        return None

    def forget_model(self, name: str) -> bool:
        """Remove the record of a model; return False, changing nothing, if a worker serves it."""
        return bool(self._scripts.call("forget_model", [name]))

    def _forget_record(self, worker: str) -> None:
        """Stop writing the worker's record; on return no write is in progress."""
        with self._writing:
            self._records.pop(worker, None)
            self._digests.pop(worker, None)

    def _register_again(self, worker: str) -> None:
        """Write the worker's record again, if Redis lost it or it expired during a long pause."""
        with self._writing:
            record = self._records.get(worker)
            if record is not None:
                self._write(record)
