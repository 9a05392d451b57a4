"""One rank of a replica: its weights, its KV cache and its steps.

A replica of one process has one rank.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from workers.engine.backends.registry import find_backend
from workers.engine.checkpoint.decoder_loader import load_weights
from workers.engine.checkpoint.model_checkpoint import ModelCheckpoint, open_checkpoint, shard_checkpoint
from workers.engine.checkpoint.pooling_loader import load_pooling_model
from workers.engine.checkpoint.weight_size import weight_bytes
from workers.engine.cuda.out_of_memory import is_out_of_memory, one_line
from workers.engine.device.cache_plan import cache_groups, cpu_cache_bytes, plan_cache, settle_prefix_caching
from workers.engine.device.device import check_gpu, usable_device
from workers.engine.device.memory import GpuMemory, available_memory, gib
from workers.engine.device.memory_profiling import profile_memory
from workers.engine.device.model_runner import LaunchedStep, ModelRunner
from workers.engine.device.pooling_runner import PoolingRunner, make_runner
from workers.engine.layers.int8_ops import Int8Ops
from workers.engine.layers.parallel import Parallel
from workers.engine.messages.config import EngineConfig
from workers.engine.messages.errors import ModelLoadError, RankError, StepOutOfMemory
from workers.engine.messages.resolved_config import ResolvedConfig
from workers.engine.messages.step import MakeMasks, StepPlan, StepResult
from workers.engine.models.base import DecoderModel
from workers.engine.models.config import ModelConfig
from workers.engine.models.pooling import PoolingModel
from workers.engine.models.registry import Family

logger = logging.getLogger(__name__)


class Rank:
    """Loads one rank's part of the model, then launches and retires steps.

    - The constructor takes the results of `resolve` and `open_shard`.
    - `load` reads the weights and returns the bytes available to the cache.
    - `allocate` allocates the cache; its size is the same on all ranks of a replica.
    - `settle` does both, at the same time on all ranks.

    All raise ModelLoadError if the model cannot be loaded or a setting does not suit it.
    """

    def __init__(self, config: ResolvedConfig, checkpoint: ModelCheckpoint) -> None:
        self._began = time.monotonic()
        self._config = config
        self._parallel = Parallel()
        self.device = usable_device(config.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(config.threads)
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self._cache_dtype: torch.dtype = getattr(torch, config.cache_dtype)
        check_gpu(self.device, self.dtype)
        self._backend = find_backend(config.attention_backend)
        self._backend.check(self.device, self.dtype)
        if self._cache_dtype == torch.float8_e4m3fn and not self._backend.stores_fp8(self.device):
            raise ModelLoadError(
                "--kv-cache-dtype fp8 needs the engine's own kernels on an NVIDIA GPU of compute capability 8.9 or"
                f" newer, and this is the {self._backend.name} backend on {self.device}; leave it at auto"
            )
        self._checkpoint = replace(checkpoint, config=checkpoint.config.within(config.max_model_len))
        self.model_config: ModelConfig = self._checkpoint.config
        self._model: DecoderModel | PoolingModel
        self._memory: GpuMemory | None = None
        self.runner: ModelRunner | PoolingRunner

    def settle(self, parallel: Parallel) -> tuple[ResolvedConfig, int]:
        """Load and allocate as one of the ranks in `parallel`; return when all have finished.

        Returns the configuration with a `max_model_len` that fits, and the number of pages; both
        are the same on all ranks.
        """
        self._parallel = parallel
        budget = parallel.least(self.load())
        config, num_pages = plan_cache(self._config, self._model.config, self._cache_dtype, budget, self._memory)
        self.weights_seconds = time.monotonic() - self._began
        config = settle_prefix_caching(config, self.model_config)
        self.allocate(config, num_pages)
        parallel.least(0)
        return config, num_pages

    def load(self) -> int:
        """Read the weights; return the bytes that this rank has for its KV cache."""
        parallel = self._parallel
        config, model = self._config, self.model_config
        ops = self._backend.ops
        weights = weight_bytes(
            self._checkpoint,
            self.dtype,
            self._backend.widens,
            config.quantization,
            integers=ops.multiplies(4, self.dtype),
            float8=ops.multiplies_float8(self.device),
            parallel=parallel,
        )
        if self.device.type == "cuda":
            return self._load_on_gpu(weights)
        # Plan the cache first: it may not fit, or shorten the context.
        available = available_memory()
        share = None if available is None else available // parallel.size
        budget = cpu_cache_bytes(config, model, self._cache_dtype, weights, share)
        self._config, _ = plan_cache(config, model, self._cache_dtype, budget)
        with _refusing(f"the weights of {config.model}, {gib(weights)}, do not fit into memory"):
            self._model = self._load_model(self._config.max_model_len)
        return budget

    def _load_on_gpu(self, weights: int) -> int:
        config = self._config
        gpu, total = torch.cuda.get_device_name(self.device), torch.cuda.mem_get_info(self.device)[1]
        _release_unused()  # memory of an earlier model in this process
        taken = _used(self.device)
        place = f"on {gpu} with {gib(total)}, of which {gib(taken)} are taken"
        too_large = (
            f"the weights of {config.model}, {gib(weights)}, do not fit {place}; tensor_parallel_size shares them among"
            " GPUs"
        )
        # For transformers' classes the size is an estimate, which may be too large
        if weights > total - taken and isinstance(self._checkpoint.family, Family):
            raise ModelLoadError(too_large)
        with _refusing(too_large):
            self._model = self._load_model(config.max_model_len)
        if config.kv_cache_memory_bytes is not None:
            return config.kv_cache_memory_bytes
        torch.cuda.empty_cache()
        loaded = _used(self.device)
        step = f"a step of {config.max_num_batched_tokens} tokens for {config.max_num_seqs} requests"
        with _refusing(
            f"{step} does not fit beside weights of {gib(weights)} {place}; lower max_num_batched_tokens or"
            " max_num_seqs"
        ):
            graphs = profile_memory(config, self._backend, self._model)
        profiled = _used(self.device)
        _release_unused()
        self._memory = GpuMemory(
            gpu, config.gpu_memory_utilization, total, taken, loaded - taken, profiled - loaded, graphs
        )
        logger.debug("%s for the KV cache", self._memory.account)
        return max(0, self._memory.left)

    def _load_model(self, max_model_len: int) -> DecoderModel | PoolingModel:
        checkpoint, ops = self._checkpoint, self._backend.ops
        if self._config.quantization is not None:
            ops = Int8Ops(ops)
        if checkpoint.config.pooling is not None:
            return load_pooling_model(checkpoint, self.dtype, self.device, max_model_len, ops)
        model = load_weights(checkpoint, self.dtype, self.device, max_model_len, ops, self._parallel)
        model.config = model.config.within(max_model_len)  # a class of transformers has windows by its masks
        return model

    def allocate(self, config: ResolvedConfig, num_pages: int) -> None:
        """Allocate a cache of `num_pages` pages; `config` has a `max_model_len` that fits."""
        cache = gib(num_pages * cache_groups(self._model.config, self._cache_dtype, config.block_size).page_bytes)
        advice = "lower kv_cache_memory_bytes or gpu_memory_utilization"
        with _refusing(f"a KV cache of {cache} does not fit into memory beside the weights; {advice}"):
            self.runner = make_runner(config, self._backend, self._model, num_pages)
            self.runner.prepare()

    def launch(self, plan: StepPlan, masks: MakeMasks | None = None) -> LaunchedStep:
        """Launch a step.

        After StepAbandoned or StepOutOfMemory the cache is unchanged, and the step may be launched
        again, also in parts. With several ranks, want of memory raises RankError instead: the other
        ranks may be in the middle of the step and wait for this one.
        """
        try:
            return self.runner.launch(plan, masks)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            why = one_line(error)
        # The memory of the step's tensors can be freed only here: before, the error refers to them.
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        if self._parallel.size > 1:
            raise RankError(
                f"a step of {plan.counts.sum()} tokens does not fit into memory ({why}), and the other ranks"
                " cannot abandon it; lower max_num_batched_tokens or gpu_memory_utilization"
            )
        raise StepOutOfMemory(why)

    def retire(self, launched: LaunchedStep) -> StepResult:
        """Wait for the device and return the result of a step."""
        return self.runner.retire(launched)


def open_shard(config: EngineConfig) -> ModelCheckpoint:
    """Return the checkpoint of `config.model` as one rank loads it; this needs no device.

    Raises ModelLoadError.
    """
    checkpoint = open_checkpoint(
        config.model, config.model_impl, config.task, config.generation_config, config.load_format
    )
    return shard_checkpoint(checkpoint, config.tensor_parallel_size)


@contextmanager
def _refusing(why: str) -> Iterator[None]:
    """Raise ModelLoadError with the reason `why` if memory runs out in the context."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise ModelLoadError(f"{why} ({one_line(error)})") from error


def _release_unused() -> None:
    """Free unused GPU memory of this process; reference cycles hold some of it."""
    gc.collect()
    torch.cuda.empty_cache()


def _used(device: torch.device) -> int:
    """Return the bytes of a GPU that are in use by any process."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free
