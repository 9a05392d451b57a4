"""Which architectures the engine knows, by the name in config.json's `architectures`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from workers.engine.errors import ModelLoadError
from workers.engine.models import gpt2, llama, mistral, qwen2, qwen3
from workers.engine.models.base import DecoderModel
from workers.engine.models.config import Json, ModelConfig
from workers.engine.models.decoder import RotaryDecoder
from workers.engine.weights import Weights

Build = Callable[[Json, ModelConfig, Weights, int], DecoderModel]


@dataclass(frozen=True, slots=True)
class Family:
    config: Callable[[Json], ModelConfig]
    build: Build
    prefix: str  # of the bare decoder's tensors in a full checkpoint


FAMILIES: dict[str, Family] = {
    "GPT2LMHeadModel": Family(gpt2.config, gpt2.build, gpt2.GPT2.prefix),
    "LlamaForCausalLM": Family(llama.config, llama.build, RotaryDecoder.prefix),
    "MistralForCausalLM": Family(mistral.config, mistral.build, RotaryDecoder.prefix),
    "Qwen2ForCausalLM": Family(qwen2.config, qwen2.build, RotaryDecoder.prefix),
    "Qwen3ForCausalLM": Family(qwen3.config, qwen3.build, RotaryDecoder.prefix),
}


def find_family(raw: Json) -> Family:
    """Raises ModelLoadError for an architecture that is not known."""
    names = raw.get("architectures") or []
    if isinstance(names, list) and names and names[0] in FAMILIES:
        return FAMILIES[names[0]]
    found = f"the architecture {names[0]!r}" if isinstance(names, list) and names else "no architecture"
    raise ModelLoadError(f"config.json names {found}; supported are {', '.join(FAMILIES)}")
