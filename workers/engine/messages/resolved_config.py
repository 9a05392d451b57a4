"""What a replica runs with, once everything is decided."""

from dataclasses import dataclass

from workers.engine.messages.config import EngineConfig


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig(EngineConfig):
    """The same once everything is decided for a device and a model, by `device.resolve`.

    `may_shorten`: `max_model_len` is the model's own, and becomes what the KV cache can hold.
    `cache_dtype` is that of keys and values.
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
