"""The resolved configuration of a replica."""

from dataclasses import dataclass

from workers.engine.messages.config import EngineConfig


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig(EngineConfig):
    """An `EngineConfig` that `device.resolve` has completed for a device and a model.

    `may_shorten`: `max_model_len` is the model's own, and is lowered to fit the KV cache.
    `cache_dtype` is the dtype of keys and values.
    """

    max_model_len: int
    may_shorten: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    cache_dtype: str
    live_step_ms: float
    depth: int
    threads: int
