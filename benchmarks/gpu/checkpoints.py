"""Checkpoints of the rows' models in the run's scratch folder."""

from pathlib import Path
from typing import Any

from benchmarks.gpu.setting import Setting
from benchmarks.models import settings_of
from benchmarks.quantized_weights import write_quantized
from benchmarks.weights import write_checkpoint

_TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "vocab_size": 160,
}


def shape_of(setting: Setting, name: str) -> dict[str, Any]:
    """Return a model's configuration by transformers' names; on a CPU a tiny one of the same
    family.
    """
    return {**settings_of(name), **(_TINY if setting.tiny else {})}


def checkpoint(setting: Setting, name: str, kind: str | None = None) -> str:
    """Return the folder of the model's weights, written on first use; `kind` is one of the KINDS of
    quantized weights.
    """
    folder = Path(setting.scratch) / (name if kind is None else f"{name}-{kind}")
    if not (folder / "config.json").exists():
        unfinished = folder.with_name(f"{folder.name}.unfinished")
        if kind is None:
            write_checkpoint(shape_of(setting, name), unfinished)
        else:
            write_quantized(shape_of(setting, name), unfinished, kind)
        unfinished.rename(folder)
    return str(folder)
