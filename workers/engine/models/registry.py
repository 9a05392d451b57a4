"""List the supported architectures by their names in config.json's `architectures`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from workers.engine.layers.base import Projection
from workers.engine.layers.weights import Weights
from workers.engine.messages.errors import ModelLoadError
from workers.engine.models import (
    bert,
    cohere,
    cohere2,
    distilbert,
    exaone4,
    gemma,
    gemma2,
    gemma3,
    gemma4,
    gemma4_unified,
    gpt2,
    llama,
    ministral,
    ministral3,
    mistral,
    modernbert,
    mpnet,
    olmo2,
    olmo3,
    phi3,
    qwen2,
    qwen3,
    roberta,
    smollm3,
    starcoder2,
)
from workers.engine.models.base import DecoderModel, EncoderModel
from workers.engine.models.classifier import first_token, score_head
from workers.engine.models.config import Json, ModelConfig
from workers.engine.models.decoder import RotaryDecoder

Build = Callable[[Json, ModelConfig, Weights, int], DecoderModel | EncoderModel]
Head = Callable[[Json, ModelConfig, Weights, int], Sequence[Projection]]


@dataclass(frozen=True, slots=True)
class Family:
    config: Callable[[Json], ModelConfig]
    build: Build
    prefix: str  # of the bare model's tensor names in a full checkpoint
    head: Head = score_head  # takes the number of labels
    head_modes: Callable[[Json], tuple[str, ...]] = lambda _: ("last",)  # pooling of the head's input
    transposed: bool = False  # whether a checkpoint stores its matrices as [in, out]


FAMILIES: dict[str, Family] = {
    "GPT2LMHeadModel": Family(gpt2.config, gpt2.build, gpt2.GPT2.prefix, transposed=True),
    "CohereForCausalLM": Family(cohere.config, cohere.build, RotaryDecoder.prefix),
    "Cohere2ForCausalLM": Family(cohere2.config, cohere2.build, RotaryDecoder.prefix),
    "Exaone4ForCausalLM": Family(exaone4.config, exaone4.build, RotaryDecoder.prefix),
    "GemmaForCausalLM": Family(gemma.config, gemma.build, RotaryDecoder.prefix),
    "Gemma2ForCausalLM": Family(gemma2.config, gemma2.build, RotaryDecoder.prefix),
    "Gemma3ForCausalLM": Family(gemma3.config, gemma3.build, RotaryDecoder.prefix),
    "Gemma4ForCausalLM": Family(gemma4.config, gemma4.build, RotaryDecoder.prefix),
    "Gemma4UnifiedForCausalLM": Family(gemma4_unified.config, gemma4_unified.build, RotaryDecoder.prefix),
    "LlamaForCausalLM": Family(llama.config, llama.build, RotaryDecoder.prefix),
    "MinistralForCausalLM": Family(ministral.config, ministral.build, RotaryDecoder.prefix),
    "Ministral3ForCausalLM": Family(ministral3.config, ministral3.build, RotaryDecoder.prefix),
    "MistralForCausalLM": Family(mistral.config, mistral.build, RotaryDecoder.prefix),
    "Olmo2ForCausalLM": Family(olmo2.config, olmo2.build, RotaryDecoder.prefix),
    "Olmo3ForCausalLM": Family(olmo3.config, olmo3.build, RotaryDecoder.prefix),
    "Phi3ForCausalLM": Family(phi3.config, phi3.build, RotaryDecoder.prefix),
    "Qwen2ForCausalLM": Family(qwen2.config, qwen2.build, RotaryDecoder.prefix),
    "Qwen3ForCausalLM": Family(qwen3.config, qwen3.build, RotaryDecoder.prefix),
    "SmolLM3ForCausalLM": Family(smollm3.config, smollm3.build, RotaryDecoder.prefix),
    "Starcoder2ForCausalLM": Family(starcoder2.config, starcoder2.build, RotaryDecoder.prefix),
}

ENCODERS: dict[str, Family] = {
    "Bert": Family(bert.config, bert.build, bert.PREFIX, bert.head, first_token),
    "DistilBert": Family(distilbert.config, distilbert.build, distilbert.PREFIX, distilbert.head, first_token),
    "MPNet": Family(mpnet.config, mpnet.build, mpnet.PREFIX, roberta.head, first_token),
    "ModernBert": Family(
        modernbert.config, modernbert.build, modernbert.PREFIX, modernbert.head, modernbert.head_modes
    ),
    "Roberta": Family(roberta.config, roberta.build, roberta.PREFIX, roberta.head, first_token),
    "XLMRoberta": Family(roberta.config, roberta.build, roberta.PREFIX, roberta.head, first_token),
}
"""Encoder families by the beginning of the architecture's name."""

_CLASSIFIER = "ForSequenceClassification"
_GENERATORS = ("ForCausalLM", "LMHeadModel")
_WITHOUT_TASK = ("ForMaskedLM", "ForPreTraining", "Model")  # they can only embed
_ENDINGS = (_CLASSIFIER, *_GENERATORS, *_WITHOUT_TASK)


def find_task(raw: Json, asked: str, has_modules: bool) -> str:
    """Return a model's task: "generate", "embed", "classify" or "score".

    `has_modules` means that sentence-transformers saved the folder. Raises ModelLoadError for a
    task that the architecture does not support.
    """
    name = _architecture(raw)
    if asked == "auto":
        if name.endswith(_CLASSIFIER):
            return "classify"
        embeds = name.endswith(_WITHOUT_TASK) and not name.endswith(_GENERATORS)
        return "embed" if has_modules or embeds or _stem(name) in ENCODERS else "generate"
    if asked in ("classify", "score") and not name.endswith(_CLASSIFIER):
        raise ModelLoadError(f"--task {asked} needs a classification head, and {name} has none; choose embed")
    if asked == "generate" and _stem(name) in ENCODERS:
        raise ModelLoadError(f"--task generate needs a decoder, and {name} is an encoder; choose auto")
    return asked


def find_pooling_family(raw: Json, model_impl: str) -> Family | None:
    """Return the engine's own code for a pooling architecture, or None to use transformers' class.

    Raises ModelLoadError if neither is possible.
    """
    name = _architecture(raw)
    if model_impl == "transformers":
        return None
    found = [FAMILIES[_stem(name) + ending] for ending in _GENERATORS if _stem(name) + ending in FAMILIES]
    family = ENCODERS.get(_stem(name)) or next(iter(found), None)
    if model_impl == "own" and family is None:
        raise _no_own_code(name, pooling_code())
    return family


def pooling_code() -> list[str]:
    """Return the prefixes of the architectures that pool with the engine's own code."""
    return [*ENCODERS, *map(_stem, FAMILIES)]


def _stem(name: str) -> str:
    """Return an architecture's name without its head, and without the mark of a text model."""
    stem = next((name.removesuffix(ending) for ending in _ENDINGS if name.endswith(ending)), name)
    return stem.removesuffix("Text")


def find_family(raw: Json, model_impl: str) -> Family | None:
    """Return the engine's own code for an architecture, or None to use transformers' class.

    Raises ModelLoadError if neither is possible.
    """
    name = _architecture(raw)
    if model_impl == "transformers":
        return None
    if model_impl == "own" and name not in FAMILIES:
        raise _no_own_code(name, FAMILIES)
    return FAMILIES.get(name)


def _no_own_code(name: str, known: Iterable[str]) -> ModelLoadError:
    return ModelLoadError(
        f"config.json names the architecture {name!r}, and the engine has its own code for {', '.join(known)}; with"
        " model_impl auto, transformers' class runs where it can"
    )


def _architecture(raw: Json) -> str:
    names = raw.get("architectures") or []
    if not isinstance(names, list) or not names:
        raise ModelLoadError(
            f"config.json names no architecture; the engine has its own code for {', '.join(FAMILIES)}"
        )
    return str(names[0])
