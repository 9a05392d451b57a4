"""Settings of a fleet: the number of workers, and their resources of a Ray node."""

from dataclasses import dataclass
from math import isfinite

from jobs.settings import Settings, setting


def resource_of(text: str) -> tuple[str, float]:
    """Return name and amount of NAME=AMOUNT. Raises ValueError."""
    name, _, amount = text.partition("=")
    try:
        value = float(amount)
    except ValueError:
        value = 0.0
    if not name or not isfinite(value) or value <= 0:
        raise ValueError(f"{text!r} is not NAME=AMOUNT, such as fast_disk=1")
    return name, value


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class FleetSettings(Settings):
    """One frozen set of values for each model."""

    min_workers: int = setting(0, "Workers of each model that are there without work too.", min=0)
    max_workers: int = setting(1, "Workers of each model at most.", min=1)
    requests_per_worker: int | None = setting(
        None,
        "Requests that wait or run for which a model gets one more worker. [default: --max-num-seqs, without it 64"
        " on a CPU, 1024 on a GPU]",
        min=1,
    )
    quiet_seconds: float = setting(
        60.0, "Seconds for which fewer workers have to be enough before the others are stopped.", min=0
    )
    worker_cpus: float = setting(1.0, "CPUs of a Ray node that each worker takes; as many threads compute.", min=0)
    worker_gpus: int | None = setting(
        None,
        "GPUs of a Ray node that each worker takes. [default: --tensor-parallel-size; none with --device cpu, or with"
        " auto where no node has one]",
        min=0,
    )
    worker_resources: tuple[str, ...] = setting(
        (),
        "Resource of Ray's that each worker takes, as NAME=AMOUNT; may be repeated.",
        flag="worker-resource",
        check=resource_of,
    )
