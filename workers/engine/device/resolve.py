"""Resolve the configuration of a replica."""

from __future__ import annotations

from dataclasses import fields

import torch

from workers.engine.backends.base import Backend
from workers.engine.backends.registry import default_backend, find_backend
from workers.engine.checkpoint.dtypes import resolve_dtype
from workers.engine.messages.config import (
    CPU_ENCODER_SEQUENCES,
    CPU_LIVE_STEP_MS,
    CPU_SEQUENCES,
    GPU_LIVE_STEP_MS,
    GPU_SEQUENCES,
    EngineConfig,
)
from workers.engine.messages.errors import ModelLoadError
from workers.engine.messages.resolved_config import ResolvedConfig
from workers.engine.models.config import ModelConfig


def resolve(config: EngineConfig, device: str, model: ModelConfig) -> ResolvedConfig:
    """Set all open fields of the configuration, for a model on one of the replica's devices.

    Raises ModelLoadError for an unknown backend, for a context longer than the model's, and for an
    encoder with keys and values in 8 bits.
    """
    place = torch.device(device)
    cuda, dtype = place.type == "cuda", resolve_dtype(config.dtype, model, place)
    auto = config.attention_backend == "auto"
    backend = default_backend(place, dtype) if auto else find_backend(config.attention_backend)
    length, tokens = _longest_context(config, model), config.max_num_batched_tokens or (16384 if cuda else 1024)
    settled = {
        "device": device,
        "dtype": str(dtype).removeprefix("torch."),
        "cache_dtype": str(_cache_dtype(config, backend, model, dtype)).removeprefix("torch."),
        "attention_backend": backend.name,
        "max_model_len": length,
        "may_shorten": config.max_model_len is None,
        "max_num_seqs": config.max_num_seqs or _usual_seqs(cuda, model.whole_prompts),
        "max_num_batched_tokens": max(tokens, length) if model.whole_prompts else tokens,
        "block_size": config.block_size or 16,
        "live_step_ms": config.live_step_ms or (GPU_LIVE_STEP_MS if cuda else CPU_LIVE_STEP_MS),
        "depth": config.depth if config.depth is not None else int(cuda),
        "threads": config.compute_threads(),
    }
    return ResolvedConfig(**{field.name: getattr(config, field.name) for field in fields(EngineConfig)} | settled)


def _cache_dtype(config: EngineConfig, backend: Backend, model: ModelConfig, dtype: torch.dtype) -> torch.dtype:
    if config.kv_cache_dtype == "fp8":
        if model.whole_prompts:
            raise ModelLoadError(
                "--kv-cache-dtype fp8 is for models that generate: an encoder reads its keys and values once; leave it"
                " at auto"
            )
        return torch.float8_e4m3fn
    narrow = config.dtype == "auto" and dtype == torch.float32 and _suits_narrow_cache(model)
    return torch.bfloat16 if narrow and backend.stores_bf16() else dtype


def _suits_narrow_cache(model: ModelConfig) -> bool:
    """Return whether the KV cache is in bfloat16 by default under float32 arithmetic.

    It is for checkpoints in bfloat16: their keys and values had that precision in training. It is
    not for encoders, which read the cache once and would not be faster.
    """
    return model.dtype == "bfloat16" and not model.whole_prompts


def _usual_seqs(cuda: bool, whole_prompts: bool) -> int:
    """Return the default of max_num_seqs."""
    return GPU_SEQUENCES if cuda else CPU_ENCODER_SEQUENCES if whole_prompts else CPU_SEQUENCES


def _longest_context(config: EngineConfig, model: ModelConfig) -> int:
    """Return the configured context in tokens, by default the model's own.

    Raises ModelLoadError if it is longer than the model's.
    """
    if config.max_model_len is not None and config.max_model_len > model.max_model_len:
        raise ModelLoadError(
            f"--max-model-len is {config.max_model_len}, but the model's context is {model.max_model_len} tokens"
        )
    return config.max_model_len or model.max_model_len
