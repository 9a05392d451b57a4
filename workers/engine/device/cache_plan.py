"""Plan the KV cache of a replica: its pages and the longest context that fits."""

from __future__ import annotations

import logging
import sys
from bisect import bisect_right
from dataclasses import replace

import torch

from workers.engine.device.memory import GpuMemory, gib
from workers.engine.messages.cache_groups import CHUNK_TOKENS, CacheGroups, group_layers
from workers.engine.messages.config import CPU_CACHE_BYTES, CPU_CACHE_SHARE, available_cpus
from workers.engine.messages.errors import ModelLoadError
from workers.engine.messages.resolved_config import ResolvedConfig
from workers.engine.models.config import ModelConfig

logger = logging.getLogger(__name__)


def plan_cache(
    config: ResolvedConfig, model: ModelConfig, dtype: torch.dtype, budget: int, memory: GpuMemory | None = None
) -> tuple[ResolvedConfig, int]:
    """Return the configuration with a `max_model_len` that fits, and the number of pages.

    The pages, the null page included, fit into `budget` bytes. A request of that length always
    finishes if it is alone. Raises ModelLoadError for a context that does not fit and may not be
    shortened; the message accounts for the GPU's `memory`.
    """
    length, groups = config.max_model_len, cache_groups(model, dtype, config.block_size)
    num_pages = min(budget // groups.page_bytes, _most_pages(config, model, groups))
    blocks = range(1, -(-length // groups.grid) + 1)
    fits = groups.grid * bisect_right(blocks, num_pages - 1, key=groups.request_pages)
    if fits < 1 or (length > fits and not config.may_shorten):
        raise ModelLoadError(_does_not_fit(length, groups, budget, memory))
    if length > fits:
        logger.warning("shortened the context from %d to %d tokens to fit the KV cache", length, fits)
        length = fits
    return replace(config, max_model_len=length), num_pages


def cache_groups(model: ModelConfig, dtype: torch.dtype, block_size: int) -> CacheGroups:
    """Return the groups of a rank's layers, for a cache in `dtype`."""
    return group_layers(model.layer_caches(dtype.itemsize), block_size)


def _most_pages(config: ResolvedConfig, model: ModelConfig, groups: CacheGroups) -> int:
    """Return the most pages that can be in use.

    For models with whole prompts, only steps in flight use pages.
    """
    if not model.whole_prompts:
        return sys.maxsize
    longest = max(config.max_num_batched_tokens, config.max_model_len) // groups.grid
    blocks = (config.depth + 1) * (longest + config.max_num_seqs) + config.max_num_seqs
    return 1 + blocks * sum(group.pages for group in groups.groups)


def _does_not_fit(length: int, groups: CacheGroups, budget: int, memory: GpuMemory | None) -> str:
    needed, page = _bytes_for(groups, length), groups.page_bytes
    parts = f"{page} for each block of {groups.grid} tokens" if len(groups.groups) == 1 else f"in pages of {page}"
    wanted = f"a context of {length} tokens needs a KV cache of {needed} bytes, {parts}"
    if memory is None:
        return f"{wanted}, but {budget} are available; lower --max-model-len or raise --kv-cache-memory-bytes"
    account = memory.account if budget >= memory.left else f"{memory.account}, and another rank's GPU {gib(budget)}"
    return (
        f"{account}, but {wanted}; raise --gpu-memory-utilization, or lower --max-model-len,"
        " --max-num-batched-tokens or --max-num-seqs"
    )


def _bytes_for(groups: CacheGroups, length: int) -> int:
    """Return the bytes of a cache for one request of `length` tokens."""
    return (groups.request_pages(-(-length // groups.grid)) + 1) * groups.page_bytes


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
    groups = cache_groups(model, dtype, config.block_size)
    blocks, in_flight = (-(-tokens // groups.grid) for tokens in (config.max_model_len, CHUNK_TOKENS))
    longest = (config.max_num_seqs * groups.request_pages(blocks, in_flight) + 1) * groups.page_bytes
    if available is None:
        return min(CPU_CACHE_BYTES, longest)
    free, least = available - weights, 0 if config.may_shorten else _bytes_for(groups, config.max_model_len)
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
