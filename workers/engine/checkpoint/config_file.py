"""Check a local model's config.json before anything is started, without importing torch.

The engine checks the rest when it loads the model.
"""

from __future__ import annotations

from pathlib import Path

from workers.engine.models.config import Json, check_heads, check_ranks, layer_kinds, optional, sliding_window
from workers.engine.models.json_file import read_json
from workers.engine.models.registry import (
    FAMILIES,
    architecture_of,
    find_family,
    find_pooling_family,
    find_task,
    naming_own_code,
)
from workers.engine.models.text_part import text_part
from workers.engine.models.transformers_source import find_objection, refusal
from workers.model_folder import MODULES, transformer_folder

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    *("n_embd", "n_head", "n_layer", "n_positions"),  # GPT-2's names
)


def check_config_file(folder: Path, model_impl: str, task: str, ranks: int) -> None:
    """Raise ModelLoadError if nothing can run the model of a folder, as far as its config.json
    says.

    The arguments are the values of --model-impl, --task and --tensor-parallel-size.
    """
    raw: Json = read_json(transformer_folder(folder) / "config.json")
    if model_impl != "transformers":
        raw = text_part(raw)
    pools = find_task(raw, task, (folder / MODULES).is_file()) != "generate"
    family = find_pooling_family(raw, model_impl) if pools else find_family(raw, model_impl)
    if family is None:
        if not pools:
            _check_transformers(raw)
        return
    for name in _SIZES:
        optional(raw, name)
    if family.windowed:
        _check_windows(raw)
    _check_heads(raw, 1 if pools else ranks)


def _check_windows(raw: Json) -> None:
    if raw.get("use_sliding_window") is not False:
        sliding_window(raw)
    if raw.get("layer_types"):
        layer_kinds(raw, ())


def _check_heads(raw: Json, ranks: int) -> None:
    heads = raw.get("num_attention_heads") or raw.get("n_head")
    if heads is not None:
        kv_heads = raw.get("num_key_value_heads") or heads
        check_heads(heads, kv_heads)
        check_ranks([(heads, kv_heads)], ranks)


def _check_transformers(raw: Json) -> None:
    """Raise ModelLoadError if transformers' class for a decoder cannot run here."""
    name = architecture_of(raw)
    if why := find_objection(name, raw):
        with naming_own_code(raw, FAMILIES):
            raise refusal(name, why)
