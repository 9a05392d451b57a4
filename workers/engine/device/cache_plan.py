"""Plan the KV cache of a replica: its number of blocks and the longest context that fits."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace

import torch

from workers.engine.attention.base import CacheShape
from workers.engine.device.memory import GpuMemory, gib
from workers.engine.messages.config import CPU_CACHE_BYTES, CPU_CACHE_SHARE, available_cpus
from workers.engine.messages.errors import ModelLoadError
from workers.engine.messages.resolved_config import ResolvedConfig
from workers.engine.models.config import ModelConfig

logger = logging.getLogger(__name__)


def plan_cache(
    config: ResolvedConfig, model: ModelConfig, dtype: torch.dtype, budget: int, memory: GpuMemory | None = None
) -> tuple[ResolvedConfig, int]:
    """Return the configuration with a `max_model_len` that fits, and the number of blocks.

    The blocks, the null block included, fit into `budget` bytes. Raises ModelLoadError for a
    context that does not fit and may not be shortened; the message accounts for the GPU's `memory`.
    """
    length = config.max_model_len
    per_block = block_bytes(model, dtype, config.block_size)
    num_blocks = min(budget // per_block, _most_blocks(config, model))
    fits = (num_blocks - 1) * config.block_size
    if fits < 1 or (length > fits and not config.may_shorten):
        raise ModelLoadError(_does_not_fit(config, length, per_block, budget, memory))
    if length > fits:
        logger.warning("shortened the context from %d to %d tokens to fit the KV cache", length, fits)
        length = fits
    return replace(config, max_model_len=length), num_blocks


def _most_blocks(config: ResolvedConfig, model: ModelConfig) -> int:
    """Return the most blocks that can be in use.

    For models with whole prompts, only steps in flight use blocks.
    """
    if not model.whole_prompts:
        return sys.maxsize
    longest = max(config.max_num_batched_tokens, config.max_model_len) // config.block_size
    return 1 + (config.depth + 1) * (longest + config.max_num_seqs) + config.max_num_seqs


def _does_not_fit(config: ResolvedConfig, length: int, per_block: int, budget: int, memory: GpuMemory | None) -> str:
    needed = (-(-length // config.block_size) + 1) * per_block
    wanted = (
        f"a context of {length} tokens needs a KV cache of {needed} bytes, {per_block} for each block of"
        f" {config.block_size} tokens"
    )
    if memory is None:
        return f"{wanted}, but {budget} are available; lower --max-model-len or raise --kv-cache-memory-bytes"
    account = memory.account if budget >= memory.left else f"{memory.account}, and another rank's GPU {gib(budget)}"
    return (
        f"{account}, but {wanted}; raise --gpu-memory-utilization, or lower --max-model-len,"
        " --max-num-batched-tokens or --max-num-seqs"
    )


def block_bytes(model: ModelConfig, dtype: torch.dtype, block_size: int) -> int:
    """Return the bytes of one block in all layers."""
    shapes = (CacheShape(1, block_size, layer.kv_heads, layer.head_dim) for layer in model.layers)
    return sum(shape.block_bytes(dtype) for shape in shapes)


def cpu_cache_bytes(
    config: ResolvedConfig, model: ModelConfig, dtype: torch.dtype, weights: int, available: int | None
) -> int:
    """Return the bytes of a KV cache on a CPU: `kv_cache_memory_bytes` if set, else the least of

    1. the size for all requests at their longest
    2. the `available` bytes that the weights leave free
    3. the largest of: this replica's share of these in whole GiB, 1 GiB, and the size for one
       request of `--max-model-len`, if that is set

    The share is in whole GiB so that replicas that start one after the other get equal limits.
    Replicas that divide the CPUs divide the memory.

    The system provides pages when they are first written, and up to 1 GiB ahead of that
    (`native/cache_memory.py`), so an unused cache takes no memory. Raises ModelLoadError if
    `weights` bytes and the cache exceed the `available` bytes.
    """
    asked = config.kv_cache_memory_bytes
    if available is not None and weights + (asked or 0) > available:
        cache, advice = (f" and a KV cache of {gib(asked)}", "lower kv_cache_memory_bytes, or ") if asked else ("", "")
        raise ModelLoadError(
            f"weights of {gib(weights)}{cache} do not fit into the {gib(available)} of memory that are available;"
            f" {advice}free some"
        )
    if asked is not None:
        return asked
    one = -(-config.max_model_len // config.block_size)
    block = block_bytes(model, dtype, config.block_size)
    longest = (config.max_num_seqs * one + 1) * block
    if available is None:
        return min(CPU_CACHE_BYTES, longest)
    free, least = available - weights, 0 if config.may_shorten else (one + 1) * block
    share = int(CPU_CACHE_SHARE * _part_of_cpus(config) * free) >> 30 << 30
    return min(longest, free, max(CPU_CACHE_BYTES, share, least))


def _part_of_cpus(config: ResolvedConfig) -> float:
    return min(1.0, config.threads * config.tensor_parallel_size / available_cpus())


def settle_prefix_caching(config: ResolvedConfig, model: ModelConfig) -> ResolvedConfig:
    if model.whole_prompts:
        return replace(config, enable_prefix_caching=False)
    if config.enable_prefix_caching and not model.prefix_cacheable(config.max_model_len):
        logger.warning("prefix caching is off: this model's rotary positions depend on the length of the prompt")
        return replace(config, enable_prefix_caching=False)
    return config
