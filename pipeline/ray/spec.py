"""Specifications that `pipeline fleet` passes to the placement process, and that to workers."""

import hashlib

import msgspec

SPEC_VARIABLE = "PIPELINE_FLEET"
"""Environment variable with a `FleetSpec` as JSON."""

_STOP_MARGIN_SECONDS = 10.0  # to stop a worker, in addition to the shutdown timeout


class WorkerSpec(msgspec.Struct, frozen=True):
    """The configuration of a worker, the same on every node."""

    arguments: list[str]  # flags of `pipeline worker`
    environment: dict[str, str]  # settings of its queue
    version: str  # of the package with which the fleet was started
    log_level: str
    shutdown_timeout: float
    cpus: float
    gpus: int | None  # None: `ranks`, if any node has GPUs
    ranks: int
    resources: dict[str, float]

    @property
    def stop_seconds(self) -> float:
        """Most seconds that a worker takes to stop."""
        return self.shutdown_timeout + _STOP_MARGIN_SECONDS

    def packed(self) -> bytes:
        return msgspec.json.encode(self)

    def digest(self) -> str:
        """Return a digest that differs for workers with other flags or another version.

        It ignores log level and shutdown timeout: a change of these needs no restart.
        """
        packed = msgspec.structs.replace(self, log_level="", shutdown_timeout=0.0).packed()
        return hashlib.sha1(packed, usedforsecurity=False).hexdigest()


class ModelSpec(msgspec.Struct, frozen=True):
    """A model and the bounds of its number of workers."""

    title: str
    names: list[str]  # that requests may use
    worker: WorkerSpec
    min_workers: int
    max_workers: int
    requests_per_worker: int | None
    quiet_seconds: float
    aliases: list[str] = []  # of the names


class FleetSpec(msgspec.Struct, frozen=True):
    """All models of a fleet, and the Ray cluster for their workers."""

    address: str
    namespace: str
    redis_url: str
    log_level: str
    models: list[ModelSpec]

    def packed(self) -> str:
        return msgspec.json.encode(self).decode()


decode_worker = msgspec.json.Decoder(WorkerSpec).decode
decode_fleet = msgspec.json.Decoder(FleetSpec).decode
