"""Which architectures the engine knows, by the name in config.json's `architectures`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from workers.engine.layers.weights import Weights
from workers.engine.messages.errors import ModelLoadError
from workers.engine.models import gpt2, llama, mistral, qwen2, qwen3
from workers.engine.models.base import DecoderModel
from workers.engine.models.config import Json, ModelConfig
from workers.engine.models.decoder import RotaryDecoder

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


def find_family(raw: Json, model_impl: str) -> Family | None:
    """Return the engine's own code for an architecture; None where transformers' class is to run.

    Raises ModelLoadError where nothing may.
    """
    names = raw.get("architectures") or []
    if not isinstance(names, list) or not names:
        raise ModelLoadError(
            f"config.json names no architecture; the engine has its own code for {', '.join(FAMILIES)}"
        )
    if model_impl == "transformers":
        return None
    if model_impl == "own" and names[0] not in FAMILIES:
        raise ModelLoadError(
            f"config.json names the architecture {names[0]!r}, and the engine has its own code for"
            f" {', '.join(FAMILIES)}; with model_impl auto, transformers' class runs where it can"
        )
    return FAMILIES.get(names[0])
