"""Open a checkpoint: its folder with its configuration read; no weights yet."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from workers.engine.checkpoint.dtypes import stored_dtype
from workers.engine.checkpoint.folder import find_folder
from workers.engine.checkpoint.model_code import code_for_generating, code_for_pooling
from workers.engine.checkpoint.quantized_checkpoint import find_format
from workers.engine.checkpoint.quantized_formats import CheckpointFormat
from workers.engine.layers.weights import PLAIN_VERSION
from workers.engine.messages.errors import ModelLoadError
from workers.engine.models.classifier import classifier_config
from workers.engine.models.config import Json, ModelConfig, eos_token_ids, shard_model
from workers.engine.models.json_file import read_json
from workers.engine.models.registry import Family, find_task
from workers.engine.models.sentence_folder import embedding_config
from workers.engine.models.text_part import text_part
from workers.model_folder import MODULES, OWN_GENERATION, generation_file, transformer_folder

if TYPE_CHECKING:  # importing it takes seconds
    from workers.engine.models.padded_model import PaddedClass
    from workers.engine.models.transformers_model import TransformersClass

_MODELOPT = "hf_quant_config.json"


@dataclass(slots=True)
class ModelCheckpoint:
    """A model's folder with its configuration read; no weights yet."""

    folder: Path
    raw: Json
    family: Family | TransformersClass | PaddedClass
    config: ModelConfig
    quantized: CheckpointFormat | None = None
    text_only: bool = False  # whether `raw` is the text model's part of config.json
    dummy: bool = False  # random weights take the place of its tensors

    @property
    def stored_dtype(self) -> torch.dtype:
        return stored_dtype(self.config)


def open_checkpoint(
    name: str,
    model_impl: str = "auto",
    task: str = "auto",
    generation_config: str = OWN_GENERATION,
    load_format: str = "auto",
) -> ModelCheckpoint:
    """Find the folder, read its configuration and select the code that runs it for a task.

    `generation_config` and `load_format` are the values of the flags.

    Raises ModelLoadError.
    """
    dummy = load_format == "dummy"
    whole = find_folder(name, with_weights=not dummy)
    folder = transformer_folder(whole)
    whole_raw = read_json(folder / "config.json")
    raw = whole_raw if model_impl == "transformers" else text_part(whole_raw)
    settings = generation_file(folder, generation_config)
    generation = read_json(settings) if settings.is_file() or settings.parent != folder else {}
    quantized = find_format(raw)
    if quantized is None and (folder / _MODELOPT).is_file():
        raise ModelLoadError(
            f"the model {name} is quantized by ModelOpt ({_MODELOPT}), which cannot be read; {PLAIN_VERSION}"
        )
    task = find_task(raw, task, (whole / MODULES).is_file())
    family: Family | TransformersClass | PaddedClass
    if task == "generate":
        family = code_for_generating(name, folder, raw, model_impl, quantized is not None)
        config = family.config(raw) if isinstance(family, Family) else family.config
    else:
        family = code_for_pooling(name, folder, raw, task, model_impl, quantized is not None)
        config = family.config(raw) if isinstance(family, Family) else family.config
        config = _pooling(whole, raw, task, family, config)
    stored = raw.get("dtype") or raw.get("torch_dtype")
    config = replace(
        config,
        eos_token_ids=eos_token_ids(raw, generation),
        dtype=str(stored).removeprefix("torch.") if stored else None,
    )
    if task == "generate" and config.whole_prompts:
        raise ModelLoadError(
            f"tokens of the model {name} attend to both sides, so it cannot generate; use --task embed"
        )
    if dummy and not isinstance(family, Family):
        raise ModelLoadError(
            f"--load-format dummy needs code of the engine's own, and {config.architecture} runs by transformers'; use"
            " auto"
        )
    return ModelCheckpoint(folder, raw, family, config, quantized, raw is not whole_raw, dummy)


def _pooling(folder: Path, raw: Json, task: str, family: Family | PaddedClass, config: ModelConfig) -> ModelConfig:
    """Return the configuration for a pooling task, which needs no output projection.

    Raises ModelLoadError.
    """
    if task == "embed":
        bidirectional = config.whole_prompts if isinstance(family, Family) else not family.causal
        pooling = embedding_config(folder, raw, bidirectional)
    else:
        pooling = classifier_config(raw, family.head_modes(raw))
        if task == "score" and len(pooling.labels) > 1:
            raise ModelLoadError(
                f"--task score needs a model with one label, and {folder} has {len(pooling.labels)}; choose classify"
            )
    config = replace(config, pooling=pooling, tie_word_embeddings=True)
    pooled = len(pooling.modes) * config.hidden_size
    for dense in pooling.dense:
        if dense.size_in != pooled:
            raise ModelLoadError(f"{dense.folder} projects {dense.size_in} numbers, but pooling returns {pooled}")
        pooled = dense.size_out
    return config


def shard_checkpoint(checkpoint: ModelCheckpoint, size: int) -> ModelCheckpoint:
    """Return the checkpoint as one of `size` ranks loads it.

    Raises ModelLoadError if the model cannot be sharded among so many ranks.
    """
    if size > 1 and checkpoint.config.pooling is not None:
        raise ModelLoadError(f"a tensor parallel size of {size} is for models that generate, and this one pools; use 1")
    if size > 1 and not isinstance(checkpoint.family, Family):
        name = checkpoint.config.architecture
        raise ModelLoadError(
            f"a tensor parallel size of {size} needs code of the engine's own, and {name} runs by transformers'; use 1"
        )
    return replace(checkpoint, config=shard_model(checkpoint.config, size))
