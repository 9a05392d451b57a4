"""Find the text model in a checkpoint that also takes images, sound or video."""

from __future__ import annotations

from collections.abc import Iterable

from workers.engine.messages.errors import ModelLoadError
from workers.engine.models.config import Json

_ENDING = "ForConditionalGeneration"
_QWEN2: Json = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_window_layers": 80}
# By the type of the text model: the architecture that runs it, and transformers' defaults where
# they differ from that architecture's
_TEXT_MODELS: dict[str, tuple[str, Json]] = {
    "gemma3_text": ("Gemma3ForCausalLM", {}),
    "gemma4_text": ("Gemma4ForCausalLM", {}),
    "gemma4_unified_text": ("Gemma4UnifiedForCausalLM", {}),
    "llama": ("LlamaForCausalLM", {}),
    "ministral3": ("Ministral3ForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2_vl": ("Qwen2ForCausalLM", _QWEN2),  # of config.json without a part for text
    "qwen2_vl_text": ("Qwen2ForCausalLM", _QWEN2),
    "qwen2_5_vl": ("Qwen2ForCausalLM", _QWEN2),
    "qwen2_5_vl_text": ("Qwen2ForCausalLM", _QWEN2),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "qwen3_vl_text": ("Qwen3ForCausalLM", {"max_position_embeddings": 128000}),
}
# Settings of the whole that its text model lacks or that go before its own
_SHARED = ("quantization_config", "compression_config", "dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings")
# Beginnings of tensor names, as saved by transformers 5 and 4, in the text model's
_RENAMED = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "language_model.": "model.",
}
_UNCHANGED = ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.")


def text_part(raw: Json) -> Json:
    """Return the config.json of the text model; `raw` itself if the model takes text only.

    Raises ModelLoadError for a text model without code of the engine's own.
    """
    name, text = str((raw.get("architectures") or [""])[0]), raw.get("text_config")
    if not name.endswith(_ENDING) or (text is None and raw.get("model_type") not in _TEXT_MODELS):
        return raw
    text = raw if text is None else text
    kind = str(text.get("model_type"))
    if kind not in _TEXT_MODELS:
        experts = ", with experts," if any(text.get(each) for each in ("num_local_experts", "num_experts")) else ""
        raise ModelLoadError(
            f"config.json names {name}, whose text model is of type {kind!r}{experts} and cannot run; the engine runs"
            f" the text of types {', '.join(_TEXT_MODELS)}"
        )
    architecture, defaults = _TEXT_MODELS[kind]
    shared = {key: raw[key] for key in _SHARED if raw.get(key) is not None}
    return {**defaults, **text, **shared, "architectures": [architecture]}


def text_names(names: Iterable[str]) -> dict[str, str]:
    """Return the text model's tensors among those of the whole: their names there, and here."""
    found = {name: _text_name(name) for name in names}
    return {name: own for name, own in found.items() if own is not None}


def _text_name(name: str) -> str | None:
    if name.startswith(_UNCHANGED):
        return name
    start = next((start for start in _RENAMED if name.startswith(start)), None)
    return None if start is None else _RENAMED[start] + name.removeprefix(start)
