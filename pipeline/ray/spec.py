"""What the command `pipeline fleet` hands to the process that places workers, and that to them."""

import hashlib

import msgspec

SPEC_VARIABLE = "PIPELINE_FLEET"
"""Holds a `FleetSpec` as JSON."""

_STOP_MARGIN_SECONDS = 10.0  # for a worker to stop in, in addition to those of its requests


class WorkerSpec(msgspec.Struct, frozen=True):
    """What a worker runs with, on whichever node."""

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
        """How long it may take to stop."""
        return self.shutdown_timeout + _STOP_MARGIN_SECONDS

    def packed(self) -> bytes:
        return msgspec.json.encode(self)

    def digest(self) -> str:
        """Return what distinguishes workers whose flags or version differ.

        Log level and time to stop are left out: nothing is worth a restart for them.
        """
        packed = msgspec.structs.replace(self, log_level="", shutdown_timeout=0.0).packed()
        return hashlib.sha1(packed, usedforsecurity=False).hexdigest()


class ModelSpec(msgspec.Struct, frozen=True):
    """A model and how many workers it may have."""

    title: str
    names: list[str]  # that requests may use
    worker: WorkerSpec
    min_workers: int
    max_workers: int
    requests_per_worker: int | None
    quiet_seconds: float


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
