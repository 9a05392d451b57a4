"""The engine's configuration: one frozen value that the worker process sends to the core as its
first frame.
"""

import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from workers.model_folder import OWN_GENERATION

TASKS = ("auto", "generate", "embed", "classify", "score")
CPU_LIVE_STEP_MS, GPU_LIVE_STEP_MS = 150.0, 50.0
"""Defaults of `live_step_ms`."""

CPU_SEQUENCES, CPU_ENCODER_SEQUENCES, GPU_SEQUENCES = 64, 128, 1024
"""Defaults of `max_num_seqs`; larger for an encoder, since short texts would not fill a step."""

_CGROUP_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
CPU_CACHE_SHARE = 0.4  # share of the memory after the weights that KV caches get on a CPU
CPU_CACHE_BYTES = 1 << 30  # least size of one cache, as far as free, and its size if free memory is unknown
_PROCESSES_PER_CPU = 8


def _flag(default: Any, help: str, **metadata: Any) -> Any:
    """Declare a field that is also a flag of the command line.

    The keys of its metadata are those of `jobs/settings.py`, which the engine does not import.
    """
    return field(default=default, metadata={"help": help, **metadata})


@dataclass(frozen=True, kw_only=True, repr=False)
class EngineConfig:
    """The configuration of one model replica.

    The core resolves `None` and "auto" once, in a `ResolvedConfig`. A field with a help is a flag
    of the command line.

    The scheduler runs `depth` steps ahead of the tokens that it has received. `threads` is the
    number of threads of one process (None: an equal share of `all_threads()`). Raises ValueError
    for a value out of range.
    """

    model: str
    tokenizer: str | None = _flag(None, "Folder or hub name of the tokenizer. [default: the model's]")
    model_impl: str = _flag(
        "auto",
        "Code that runs the model; auto: the engine's own if it has the architecture, else transformers'.",
        choices=("auto", "own", "transformers"),
    )
    load_format: str = _flag(
        "auto",
        "auto: weights from safetensors. dummy: random ones in the checkpoint's formats, from config.json alone, to"
        " measure speed without a download; the tokenizer must be there.",
        choices=("auto", "dummy"),
    )
    task: str = _flag(
        "auto",
        "What the model does; auto: what its folder was made for. embed: with any of the engine's own models.",
        choices=TASKS,
    )
    generation_config: str = _flag(
        OWN_GENERATION,
        "generation_config.json with the defaults of what a call leaves unset (temperature, top_p, top_k, min_p,"
        " repetition_penalty, max_new_tokens), and the stop tokens. auto: the model's; vllm: its stop tokens alone; or"
        " a folder that has one.",
    )
    device: str = _flag(
        "auto", "cuda (any free GPU), cuda:1 (that one) or cpu; auto: a GPU if there is one.", kind="device"
    )
    tensor_parallel_size: int = _flag(
        1, "GPUs (on a CPU, processes) that share one copy of the model; must divide its attention heads.", min=1
    )
    device_lock_folder: str | None = _flag(
        None,
        "Folder of the locks on GPUs, one for all workers of a host, containers too. [default: /run/lock or /tmp]",
        kind="folder",
    )
    dtype: str = _flag(
        "auto",
        "Type that the model computes in. auto: on a GPU the checkpoint's, bfloat16 for float32; on a CPU with"
        " instructions for bfloat16 that for a checkpoint in bfloat16; else float32.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str | None = _flag(
        None,
        "Store the model's matrices in fewer bits, whatever its checkpoint has. int8: one scale for each output;"
        " smaller, and faster on a CPU; not yet measured on a GPU. [default: none]",
        choices=("int8",),
    )
    kv_cache_dtype: str = _flag(
        "auto",
        "Type of keys and values in the KV cache. auto: the model's, on a CPU bfloat16 for checkpoints in it. fp8, on a"
        " GPU: 8 bits (e4m3), so that it holds twice the tokens of bfloat16.",
        choices=("auto", "fp8"),
    )
    max_model_len: int | None = _flag(
        None, "Longest prompt and answer together, in tokens. [default: from the model's config]", min=1, kind="size"
    )
    max_num_seqs: int | None = _flag(
        None,
        f"Sequences (choices of requests) that run at once. [default: {CPU_SEQUENCES} on a CPU"
        f" ({CPU_ENCODER_SEQUENCES} for an encoder), {GPU_SEQUENCES} on a GPU]",
        min=1,
        kind="size",
    )
    max_num_batched_tokens: int | None = _flag(
        None, "Tokens computed in one step. [default: 1024 on a CPU, 16384 on a GPU]", min=1, kind="size"
    )
    block_size: int | None = _flag(None, "Tokens per block of the KV cache.", min=1, kind="size")
    enable_prefix_caching: bool = _flag(True, "Reuse the KV cache of shared prompt beginnings.")
    gpu_memory_utilization: float = _flag(0.9, "Share of the GPU's memory to use.", above=0.0, max=1.0)
    kv_cache_memory_bytes: int | None = _flag(
        None,
        "Size of the KV cache on each GPU, or on the CPU. [default: what --gpu-memory-utilization leaves on a GPU,"
        f" {CPU_CACHE_SHARE:.0%} of free memory on a CPU]",
        min=1,
        kind="size",
    )
    enforce_eager: bool = _flag(False, "Launch every kernel by itself, without CUDA graphs; saves the graphs' memory.")
    live_step_ms: float | None = _flag(
        None,
        "Milliseconds that a step may take while a live call runs or waits; a step in which all running sequences get"
        " a token may take longer, and one that live prompts fill up to 3 times that."
        f" [default: {CPU_LIVE_STEP_MS:g} on a CPU, {GPU_LIVE_STEP_MS:g} on a GPU]",
        min=1,
    )
    step_timeout: float | None = _flag(
        None,
        "Seconds without a step after which the engine core counts as hung. [default: 300; lowered from the measured"
        " step times]",
        min=1,
    )
    profile: str | None = _flag(
        None, "Folder for a trace of some steps of the engine core, in Chrome's format.", kind="folder"
    )
    nvtx: bool = _flag(False, "Name the parts of each step for Nsight Systems.")
    depth: int | None = field(default=None, metadata={"choices": (0, 1)})
    threads: int | None = field(default=None, metadata={"min": 1})
    attention_backend: str = "auto"

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            limits = {} if value is None else one.metadata
            if value not in limits.get("choices", (value,)):
                raise ValueError(f"{one.name} must be {' or '.join(map(str, limits['choices']))}, got {value!r}")
            if "min" in limits and not value >= limits["min"]:
                raise ValueError(f"{one.name} must be at least {limits['min']}, got {value}")
            if "above" in limits and not limits["above"] < value <= limits["max"]:
                raise ValueError(f"{one.name} must be above {limits['above']}, at most {limits['max']}, got {value}")

    def compute_threads(self) -> int:
        """Return the number of compute threads of each rank: `threads`, else an equal share of
        `all_threads()`.
        """
        return self.threads or max(1, all_threads() // self.tensor_parallel_size)


def all_threads() -> int:
    """Return the number of compute threads of all child processes together.

    It is OMP_NUM_THREADS, else the number of CPUs that this process may use.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() and int(asked) > 0 else available_cpus()


def most_processes() -> int:
    """Return the most ranks, of all replicas together, that this machine accepts.

    It is enough for tests on few CPUs, and for GPUs, each of which needs one CPU. More ranks would
    only compete for memory and time.
    """
    return _PROCESSES_PER_CPU * available_cpus()


def available_cpus() -> int:
    """Return the number of CPUs by affinity or by quota, whichever is fewer; at least 1."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _CGROUP_CPU_MAX.read_text().split()
    except (OSError, ValueError):
        return cpus
    return cpus if quota == "max" else max(1, min(cpus, int(quota) // int(period)))
