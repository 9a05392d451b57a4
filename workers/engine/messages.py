"""Messages between the front process and the engine core. Imports no torch."""

from __future__ import annotations

import msgspec


class SamplingParams(msgspec.Struct, frozen=True):
    max_tokens: int
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 = all
    seed: int = 0  # 64 bit unsigned, always set
    choice: int = 0  # part of the noise hash
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()


class EngineRequest(msgspec.Struct):
    """A request as the front hands it to the core."""

    request_id: int  # chosen by the front, unique per core life
    prompt_token_ids: list[int]
    output_token_ids: list[int]  # forced prefix from a checkpoint; counts as output already generated (max_tokens includes it)
    sampling: SamplingParams
    live: bool = False
    priority: int = 0  # lower is more urgent among equals
