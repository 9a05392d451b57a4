"""Where a replica's model lives: loads it, sizes its cache, runs its steps. One process; a process per rank would stand behind the same
calls."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import torch

from workers.engine.attention import CacheShape
from workers.engine.config import EngineConfig
from workers.engine.device import check_dtype, usable_device
from workers.engine.errors import ModelLoadError, StepOutOfMemory
from workers.engine.layers.ops import make_ops
from workers.engine.loader import load_weights, open_checkpoint, resolve_dtype, weight_bytes
from workers.engine.memory import available_memory, gib
from workers.engine.model_runner import LaunchedStep, ModelRunner
from workers.engine.models.config import ModelConfig
from workers.engine.sampling.limits import AT_ONCE
from workers.engine.step import StepPlan, StepResult

logger = logging.getLogger(__name__)

_CPU_CACHE_BYTES = 1 << 30
_SAMPLED_BYTES = 32  # of temporaries for each logit that a device samples from at once: 64-bit noise, a sort with its indices


class Executor:
    """Loads `config.model` and allocates its cache; then runs steps in order.

    `config` afterwards is the resolved configuration with `max_model_len` settled, and prefix caching off where the model rules it out.
    Raises ModelLoadError where the model cannot be loaded or a setting does not suit it.
    """

    def __init__(self, config: EngineConfig) -> None:
        config = config.resolve()
        device = usable_device(config.device)
        if device.type == "cpu" and config.threads is not None:
            torch.set_num_threads(config.threads)
        ops = make_ops(config.attention_backend)
        started = time.monotonic()
        checkpoint = open_checkpoint(config.model)
        model, dtype = checkpoint.config, resolve_dtype(config.dtype, checkpoint.config, device)
        check_dtype(device, dtype)
        # On a CPU the cache is planned first, for the context may come out shorter; on a GPU what the weights leave decides.
        try:
            if device.type == "cpu":
                budget = _cpu_cache_bytes(config, model, dtype, weight_bytes(checkpoint, dtype), available_memory())
                config, self.num_blocks = plan_cache(config, model, dtype, budget)
                decoder = load_weights(checkpoint, dtype, device, config.max_model_len, ops)
            else:
                decoder = load_weights(checkpoint, dtype, device, config.max_model_len, ops)
                config, self.num_blocks = plan_cache(config, model, dtype, _device_cache_bytes(config, model, device))
            self.weights_seconds = time.monotonic() - started
            self.config = _settle_prefix_caching(config, model)
            self.model_config, self.dtype = model, dtype
            self.runner = ModelRunner(self.config, decoder, self.num_blocks)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise ModelLoadError(f"weights and KV cache of {config.model} do not fit into memory on {device}: {error}") from error

    @property
    def vocab_size(self) -> int:
        return self.model_config.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.model_config.eos_token_ids

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Raises StepOutOfMemory, after which the cache holds what it held before and the step may be launched again, in other parts."""
        try:
            return self.runner.launch(plan)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            why = one_line(error)
        # Only here, where no error holds on to the step's tensors any more, can their memory be had again.
        if self.runner.device.type == "cuda":
            torch.cuda.empty_cache()
        raise StepOutOfMemory(why)

    def retire(self, launched: LaunchedStep) -> StepResult:
        return self.runner.retire(launched)


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory for a tensor or an array could not be had, on the device, where cuBLAS takes some at its first use, or on the host."""
    signs = ("out of memory", "can't allocate memory", "std::bad_alloc", "ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(sign in str(error) for sign in signs)


def one_line(error: Exception) -> str:
    """The first line of an error's text, which for torch is followed by advice; else its kind."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def plan_cache(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, budget: int) -> tuple[EngineConfig, int]:
    """The configuration with `max_model_len` settled, and how many blocks (the null block among them) `budget` bytes hold.

    A context that was not asked for is shortened to what fits. Raises ModelLoadError for one that was and does not.
    """
    assert config.block_size is not None
    if config.max_model_len is not None and config.max_model_len > model.max_model_len:
        raise ModelLoadError(f"max_model_len is {config.max_model_len}, but the model's context is {model.max_model_len} tokens")
    length = config.max_model_len or model.max_model_len
    per_block = block_bytes(model, dtype, config.block_size)
    num_blocks = budget // per_block
    fits = (num_blocks - 1) * config.block_size
    if fits < 1 or (length > fits and config.max_model_len is not None):
        needed = (-(-length // config.block_size) + 1) * per_block
        raise ModelLoadError(
            f"a context of {length} tokens needs a KV cache of {needed} bytes, but {budget} are available; "
            "lower max_model_len or raise kv_cache_memory_bytes"
        )
    if length > fits:
        logger.warning("the context is shortened from %d to %d tokens, which is what the KV cache holds", length, fits)
        length = fits
    return replace(config, max_model_len=length), num_blocks


def block_bytes(model: ModelConfig, dtype: torch.dtype, block_size: int) -> int:
    """Bytes of one block over all layers."""
    return CacheShape(1, block_size, model.num_kv_heads, model.head_dim).block_bytes(dtype) * model.num_layers


def _cpu_cache_bytes(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, weights: int, available: int | None) -> int:
    """What was asked for, else what all requests at their longest need, at most a GiB and what the weights leave of the machine.

    Raises ModelLoadError where `weights` bytes and the cache are more than the `available` ones.
    """
    asked = config.kv_cache_memory_bytes
    if available is not None and weights + (asked or 0) > available:
        cache, advice = (f" and a KV cache of {gib(asked)}", "lower kv_cache_memory_bytes, or ") if asked else ("", "")
        raise ModelLoadError(
            f"weights of {gib(weights)}{cache} do not fit into the {gib(available)} of memory that are available; {advice}free some"
        )
    if asked is not None:
        return asked
    assert config.block_size is not None
    assert config.max_num_seqs is not None
    per_request = -(-(config.max_model_len or model.max_model_len) // config.block_size)
    wanted = min(_CPU_CACHE_BYTES, (config.max_num_seqs * per_request + 1) * block_bytes(model, dtype, config.block_size))
    return wanted if available is None else min(wanted, available - weights)


def _device_cache_bytes(config: EngineConfig, model: ModelConfig, device: torch.device) -> int:
    """What `gpu_memory_utilization` leaves beside the weights and the largest step's activations."""
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    assert config.max_num_batched_tokens is not None
    assert config.max_num_seqs is not None
    free, total = torch.cuda.mem_get_info(device)
    per_token = 4 * (8 * model.hidden_size + 3 * model.intermediate_size)
    activations = config.max_num_batched_tokens * per_token + 4 * 4 * config.max_num_seqs * model.vocab_size + _SAMPLED_BYTES * AT_ONCE
    return max(0, int(total * config.gpu_memory_utilization) - (total - free) - activations)


def _settle_prefix_caching(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    assert config.max_model_len is not None
    if config.enable_prefix_caching and not model.prefix_cacheable(config.max_model_len):
        logger.warning("prefix caching is off: this model's rotary positions depend on the length of the prompt")
        return replace(config, enable_prefix_caching=False)
    return config
