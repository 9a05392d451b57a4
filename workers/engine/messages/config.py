"""The engine's configuration: one frozen value that the worker process sends to the core as its
first frame.
"""

import os
from dataclasses import dataclass
from pathlib import Path

_CGROUP_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
_PROCESSES_PER_CPU = 8
_COUNTS = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "kv_cache_memory_bytes",
    "threads",
    "tensor_parallel_size",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What one model replica runs with.

    `None` and "auto" mean: decided once, in the core, which makes a `ResolvedConfig` of it.

    `model_impl`: whose code runs the model, "own", "transformers", or "auto": the engine's own
    where it has some for the architecture. `max_model_len` and `max_num_batched_tokens` count
    tokens, `kv_cache_memory_bytes` bytes, `gpu_memory_utilization` is a fraction of the device's
    memory. `depth` is how many steps the scheduler runs ahead of the tokens it has seen: 0 or 1.
    `step_timeout`: seconds without a step, while there are requests, after which the core counts as
    hung and is killed (None: as `watchdog.WatchdogTimeout` estimates). `tensor_parallel_size`
    processes share the model, each on a GPU of its own; `device_lock_folder` is where workers of a
    host agree who has which (None: the usual one, see `device_lock.py`). `threads` are those of one
    process (None: an equal share of `all_threads()`). `enforce_eager` does without CUDA graphs.
    `profile` is a folder for a trace of some steps, `nvtx` names the parts of a step for Nsight
    Systems (`profiling.py`). `debug` turns on the integrity check each time the core becomes idle.
    Raises ValueError for a value out of range.
    """

    model: str
    tokenizer: str | None = None
    model_impl: str = "auto"
    dtype: str = "auto"
    device: str = "auto"
    device_lock_folder: str | None = None
    tensor_parallel_size: int = 1
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    enable_prefix_caching: bool = True
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    depth: int | None = None
    threads: int | None = None
    attention_backend: str = "auto"
    enforce_eager: bool = False
    step_timeout: float | None = None
    profile: str | None = None
    nvtx: bool = False
    debug: bool = False

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.model_impl not in ("auto", "own", "transformers"):
            raise ValueError(f"model_impl must be auto, own or transformers, got {self.model_impl!r}")
        if self.depth not in (None, 0, 1):
            raise ValueError(f"depth must be 0 or 1, got {self.depth}")
        if self.step_timeout is not None and not self.step_timeout > 0:
            raise ValueError(f"step_timeout must be above 0 s, got {self.step_timeout}")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ValueError(f"gpu_memory_utilization must lie in (0, 1], got {self.gpu_memory_utilization}")

    def compute_threads(self) -> int:
        """Threads for the arithmetic of each rank: `threads`, else an equal share of
        `all_threads()`.
        """
        return self.threads or max(1, all_threads() // self.tensor_parallel_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig(EngineConfig):
    """The same once everything is decided for a device and a model, by `device.resolve`.

    `may_shorten`: `max_model_len` is the model's own, and becomes what the KV cache can hold.
    """

    max_model_len: int
    may_shorten: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    depth: int
    threads: int


def all_threads() -> int:
    """Threads for the arithmetic of all processes below this one together: OMP_NUM_THREADS, else
    the CPUs that this process may use.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() and int(asked) > 0 else available_cpus()


def most_processes() -> int:
    """Return how many ranks, of all replicas together, this machine may be asked to run: enough for
    tests on few CPUs, and for GPUs, of which each needs a CPU that feeds it; beyond that they would
    only take each other's memory and time.
    """
    return _PROCESSES_PER_CPU * available_cpus()


def available_cpus() -> int:
    """CPUs by affinity and by the container's quota, whichever is fewer; at least 1."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _CGROUP_CPU_MAX.read_text().split()
    except (OSError, ValueError):
        return cpus
    return cpus if quota == "max" else max(1, min(cpus, int(quota) // int(period)))
