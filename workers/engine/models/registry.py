"""List the supported architectures by their names in config.json's `architectures`.

Families are imported as they are used, so the command line reads this list without torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from workers.engine.messages.errors import ModelLoadError
from workers.engine.models.config import Json, ModelConfig

if TYPE_CHECKING:
    from workers.engine.layers.base import Projection
    from workers.engine.layers.weights import Weights
    from workers.engine.models.base import DecoderModel, EncoderModel

_FIRST = "classifier.first_token"


@dataclass(frozen=True, slots=True)
class Family:
    """A module of this package with `config` and `build`, and how its checkpoints differ."""

    module: str
    prefix: str = "model."  # of the bare model's tensor names in a full checkpoint; layers write "*."
    windowed: bool = False  # whether it reads `sliding_window` and, if there, `layer_types`
    head_function: str = "classifier.score_head"  # takes the number of labels
    head_modes_function: str = "classifier.last_token"  # pooling of the head's input
    transposed: bool = False  # whether a checkpoint stores its matrices as [in, out]

    def config(self, raw: Json) -> ModelConfig:
        config: ModelConfig = _imported(f"{self.module}.config")(raw)
        return config

    def build(
        self, raw: Json, config: ModelConfig, weights: Weights, max_model_len: int
    ) -> DecoderModel | EncoderModel:
        model: DecoderModel | EncoderModel = _imported(f"{self.module}.build")(raw, config, weights, max_model_len)
        return model

    def head(self, raw: Json, config: ModelConfig, weights: Weights, labels: int) -> Sequence[Projection]:
        head: Sequence[Projection] = _imported(self.head_function)(raw, config, weights, labels)
        return head

    def head_modes(self, raw: Json) -> tuple[str, ...]:
        modes: tuple[str, ...] = _imported(self.head_modes_function)(raw)
        return modes


def _imported(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(f"{__package__}.{module}"), name)


FAMILIES: dict[str, Family] = {
    "GPT2LMHeadModel": Family("gpt2", "transformer.", transposed=True),
    "ApertusForCausalLM": Family("apertus"),
    "ArceeForCausalLM": Family("arcee"),
    "CohereForCausalLM": Family("cohere"),
    "Cohere2ForCausalLM": Family("cohere2", windowed=True),
    "Ernie4_5ForCausalLM": Family("ernie4_5"),
    "Exaone4ForCausalLM": Family("exaone4", windowed=True),
    "GemmaForCausalLM": Family("gemma"),
    "Gemma2ForCausalLM": Family("gemma2", windowed=True),
    "Gemma3ForCausalLM": Family("gemma3", windowed=True),
    "Gemma4ForCausalLM": Family("gemma4", windowed=True),
    "Gemma4UnifiedForCausalLM": Family("gemma4_unified", windowed=True),
    "GlmForCausalLM": Family("glm"),
    "Glm4ForCausalLM": Family("glm"),
    "GPTNeoXForCausalLM": Family("gpt_neox", "gpt_neox."),
    "GraniteForCausalLM": Family("granite"),
    "HeliumForCausalLM": Family("helium"),
    "HunYuanDenseV1ForCausalLM": Family("hunyuan"),
    "HyperCLOVAXForCausalLM": Family("hyperclovax"),
    "InternLM3ForCausalLM": Family("internlm3"),
    "Jais2ForCausalLM": Family("jais2"),
    "LlamaForCausalLM": Family("llama"),
    "MinistralForCausalLM": Family("ministral", windowed=True),
    "Ministral3ForCausalLM": Family("ministral3", windowed=True),
    "MistralForCausalLM": Family("mistral", windowed=True),
    "NemotronForCausalLM": Family("nemotron"),
    "Olmo2ForCausalLM": Family("olmo2"),
    "Olmo3ForCausalLM": Family("olmo3", windowed=True),
    "PhiForCausalLM": Family("phi"),
    "Phi3ForCausalLM": Family("phi3", windowed=True),
    "Qwen2ForCausalLM": Family("qwen2", windowed=True),
    "Qwen3ForCausalLM": Family("qwen3", windowed=True),
    "SeedOssForCausalLM": Family("seed_oss"),
    "SmolLM3ForCausalLM": Family("smollm3", windowed=True),
    "StableLmForCausalLM": Family("stablelm"),
    "Starcoder2ForCausalLM": Family("starcoder2", windowed=True),
}

ENCODERS: dict[str, Family] = {
    "Bert": Family("bert", "bert.", head_function="bert.head", head_modes_function=_FIRST),
    "DistilBert": Family("distilbert", "distilbert.", head_function="distilbert.head", head_modes_function=_FIRST),
    "MPNet": Family("mpnet", "mpnet.", head_function="roberta.head", head_modes_function=_FIRST),
    "ModernBert": Family("modernbert", head_function="modernbert.head", head_modes_function="modernbert.head_modes"),
    "Roberta": Family("roberta", "roberta.", head_function="roberta.head", head_modes_function=_FIRST),
    "XLMRoberta": Family("roberta", "roberta.", head_function="roberta.head", head_modes_function=_FIRST),
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
    name = architecture_of(raw)
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
    name = architecture_of(raw)
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
    name = architecture_of(raw)
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


def architecture_of(raw: Json) -> str:
    """Return the name in config.json. Raise ModelLoadError if there is none."""
    names = raw.get("architectures") or []
    if not isinstance(names, list) or not names:
        raise ModelLoadError(
            f"config.json names no architecture; the engine has its own code for {', '.join(FAMILIES)}"
        )
    return str(names[0])


@contextmanager
def naming_own_code(raw: Json, known: Iterable[str]) -> Iterator[None]:
    """Add the architectures with code in the engine to a refusal of transformers' class.

    `known`: beginnings of the architectures' names.
    """
    name = architecture_of(raw)
    try:
        yield
    except ModelLoadError as error:
        if name.startswith(tuple(known)):
            raise
        raise ModelLoadError(
            f"the engine has no code of its own for {name}, and {error}; it has for {', '.join(known)}"
        ) from error
