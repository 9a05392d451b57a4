"""Load a model by name, from a local folder or a repository of the hub.

Weights are read from safetensors only, and code from the checkpoint is never run.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from workers.engine.device.quantized_checkpoint import count_bytes, find_format, plain_readers
from workers.engine.device.quantized_formats import CheckpointFormat
from workers.engine.device.quantized_matrix import Reader
from workers.engine.layers.base import Ops
from workers.engine.layers.parallel import Parallel
from workers.engine.layers.weights import PLAIN_VERSION, Weights
from workers.engine.messages.errors import ModelLoadError
from workers.engine.models.base import DecoderModel
from workers.engine.models.classifier import classifier_config
from workers.engine.models.config import Json, ModelConfig, eos_token_ids, shard_model
from workers.engine.models.json_file import read_json
from workers.engine.models.registry import (
    FAMILIES,
    Family,
    find_family,
    find_pooling_family,
    find_task,
    pooling_code,
)
from workers.engine.models.sentence_folder import embedding_config
from workers.model_folder import (
    MODULES,
    OWN_GENERATION,
    folder_problem,
    generation_file,
    pointer_problem,
    transformer_folder,
    weights_problem,
)

if TYPE_CHECKING:  # importing it takes seconds
    from workers.engine.models.padded_model import PaddedClass
    from workers.engine.models.transformers_model import TransformersClass

logger = logging.getLogger(__name__)

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_INDEX = "model.safetensors.index.json"
# Some repositories hold a second copy of the weights, under their author's own names
_CONSOLIDATED = "consolidated*"
_OTHERS = (_CONSOLIDATED, "adapter_*")
# All folders of a repository, except sentence-transformers' modules such as 1_Pooling
_NOT_NEEDED = ["[!0-9]*/*", _CONSOLIDATED]
_MODELOPT = "hf_quant_config.json"
# Buffers in old checkpoints; they follow from the configuration.
_DERIVED = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


@dataclass(slots=True)
class ModelCheckpoint:
    """A model's folder with its configuration read; no weights yet."""

    folder: Path
    raw: Json
    family: Family | TransformersClass | PaddedClass
    config: ModelConfig
    quantized: CheckpointFormat | None = None


def open_checkpoint(
    name: str, model_impl: str = "auto", task: str = "auto", generation_config: str = OWN_GENERATION
) -> ModelCheckpoint:
    """Find the folder, read its configuration and select the code that runs it for a task.

    `generation_config` is the value of the flag.

    Raises ModelLoadError.
    """
    whole = find_folder(name)
    folder = transformer_folder(whole)
    raw = read_json(folder / "config.json")
    settings = generation_file(folder, generation_config)
    generation = read_json(settings) if settings.is_file() or settings.parent != folder else {}
    quantized = find_format(raw)
    if quantized is None and (folder / _MODELOPT).is_file():
        raise ModelLoadError(
            f"the model {name} is quantized by ModelOpt ({_MODELOPT}), which cannot be read; {PLAIN_VERSION}"
        )
    task = find_task(raw, task, (whole / MODULES).is_file())
    own = find_family(raw, model_impl) if task == "generate" else find_pooling_family(raw, model_impl)
    if quantized is not None:
        _require_own_code(name, raw, own)
    family: Family | TransformersClass | PaddedClass
    if task == "generate":
        family = own or _transformers_class(folder, raw)
        config = family.config(raw) if isinstance(family, Family) else family.config
    else:
        family = own or _padded_class(folder, raw, task)
        config = family.config(raw) if isinstance(family, Family) else family.config
        config = _pooling(whole, raw, task, family, config)
    stored = raw.get("dtype") or raw.get("torch_dtype")
    config = replace(
        config,
        eos_token_ids=eos_token_ids(raw, generation),
        dtype=str(stored).removeprefix("torch.") if stored else None,
    )
    return ModelCheckpoint(folder, raw, family, config, quantized)


def _require_own_code(name: str, raw: Json, own: Family | None) -> None:
    """Refuse a quantized checkpoint for code that accepts only plain matrices."""
    architecture = raw["architectures"][0]
    if own is None:
        raise ModelLoadError(
            f"the model {name} is quantized, which is not supported for {architecture} by transformers' class;"
            f" {PLAIN_VERSION}"
        )
    if own.transposed:
        raise ModelLoadError(
            f"the model {name} is quantized, which is not supported for {architecture}; {PLAIN_VERSION}"
        )


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


def _transformers_class(folder: Path, raw: Json) -> TransformersClass:
    from workers.engine.models.transformers_model import find_class

    with _named(raw, FAMILIES):
        return find_class(folder, raw)


def _padded_class(folder: Path, raw: Json, task: str) -> PaddedClass:
    from workers.engine.models.padded_model import find_padded_class

    with _named(raw, pooling_code()):
        return find_padded_class(folder, raw, task)


@contextmanager
def _named(raw: Json, known: Iterable[str]) -> Iterator[None]:
    """Add the architectures with code in the engine to a refusal of transformers' class.

    `known`: beginnings of the architectures' names.
    """
    name = str(raw["architectures"][0])
    try:
        yield
    except ModelLoadError as error:
        if name.startswith(tuple(known)):
            raise
        raise ModelLoadError(
            f"the engine has no code of its own for {name} (it has for {', '.join(known)}), and {error}"
        ) from error


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


def load_weights(
    checkpoint: ModelCheckpoint,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int | None = None,
    ops: Ops | None = None,
    parallel: Parallel | None = None,
) -> DecoderModel:
    """Read the tensors and build the model for contexts of up to `max_model_len` tokens (default:
    the model's own).

    `ops` does the arithmetic of its layers (default: plain torch). A rank of several in `parallel`
    passes the result of `shard_checkpoint`.
    """
    config = checkpoint.config
    if not isinstance(checkpoint.family, Family):
        weight_files(checkpoint.folder)
        from workers.engine.models.transformers_model import TransformersClass
        from workers.engine.models.transformers_parity import load_checked

        assert isinstance(checkpoint.family, TransformersClass)
        length = max_model_len or config.max_model_len
        return load_checked(checkpoint.family, checkpoint.folder, config, Weights({}, dtype, device, ops=ops), length)
    weights = Weights(weight_readers(checkpoint), dtype, device, checkpoint.family.prefix, ops, parallel)
    model = checkpoint.family.build(checkpoint.raw, config, weights, max_model_len or config.max_model_len)
    assert isinstance(model, DecoderModel)
    derived = (*_DERIVED, "lm_head.weight") if config.tie_word_embeddings else _DERIVED
    unused = [name for name in weights.unused() if not name.endswith(derived)]
    if unused:
        logger.warning(
            "%s does not use %d tensors of %s, the first is %s",
            config.architecture,
            len(unused),
            checkpoint.folder,
            unused[0],
        )
    return model


def weight_bytes(
    checkpoint: ModelCheckpoint,
    dtype: torch.dtype,
    widens: bool = False,
    quantization: str | None = None,
    *,
    integers: bool = False,
    float8: bool = False,
) -> int:
    """Estimate the bytes of the weights in a model that computes in `dtype`.

    - `widens`: the backend stores weights in fewer bits where it can, and integers as in the
      checkpoint
    - `integers`, `float8`: the backend stores such weights as in the checkpoint
    - `quantization`: the value of the flag

    None of them applies to transformers' classes, which keep some matrices as they are. Raises
    ModelLoadError if there are no weights.
    """
    stored, size = _stored_dtype(checkpoint.config), dtype.itemsize
    if isinstance(checkpoint.family, Family):
        size = 1 if quantization else min(size, stored.itemsize) if widens else size
    if checkpoint.quantized is not None:
        shapes = _tensor_shapes(checkpoint.folder)
        return count_bytes(shapes, checkpoint.quantized, size, stays=widens or integers, float8=float8)
    return sum(file.stat().st_size for file in weight_files(checkpoint.folder)) // stored.itemsize * size


def _stored_dtype(config: ModelConfig) -> torch.dtype:
    return _DTYPES.get(config.dtype or "float32", torch.float32)


def resolve_dtype(asked: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """Return the dtype that the model computes in.

    "auto" on a GPU: the checkpoint's dtype, but bfloat16 for float32. "auto" on a CPU: bfloat16 for
    a checkpoint in bfloat16 if the CPU has instructions for it, else float32.
    """
    if asked != "auto":
        if device.type == "cpu" and _DTYPES[asked] not in (torch.float32, cpu_dtype()):
            logger.warning("--dtype %s is slow on this CPU, which has no instructions for it; use --dtype auto", asked)
        return _DTYPES[asked]
    stored = _stored_dtype(config)
    if device.type != "cpu":
        return torch.bfloat16 if stored == torch.float32 else stored
    return cpu_dtype() if stored == torch.bfloat16 else torch.float32


def cpu_dtype() -> torch.dtype:
    """Return bfloat16 if the CPU has instructions for it, else float32."""
    return torch.bfloat16 if _fast_bfloat16() else torch.float32


def _fast_bfloat16() -> bool:
    # The instructions that torch may use; ATEN_CPU_CAPABILITY can limit them
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "DEFAULT"):
        return False
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def find_folder(name: str) -> Path:
    """Return the local folder `name`, or the snapshot of the hub repository `name`.

    Raises ModelLoadError.
    """
    path = Path(name).expanduser()
    if path.exists():
        return _checked(path)
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ModelLoadError(f"the model folder {name} does not exist")
    return _checked(_download(name))


def _checked(path: Path) -> Path:
    """Return the path. Raise ModelLoadError unless it may be a model's folder."""
    if problem := folder_problem(path):
        raise ModelLoadError(problem)
    return path


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.json"], ignore_patterns=_NOT_NEEDED))
    except GatedRepoError as error:
        raise ModelLoadError(
            f"the model {name} needs an accepted license; accept it on the hub and set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelLoadError(
            f"there is no folder {name}, and the hub has no model of that name that this user may read"
        ) from error
    except HFValidationError as error:
        raise ModelLoadError(f"there is no folder {name}, and it is not a valid model name on the hub") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, RuntimeError) as error:
        where = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
        raise ModelLoadError(
            f"there is no folder {name}, and the hub at {where} cannot be reached ({type(error).__name__}); "
            "download the model and give its folder"
        ) from error


def weight_readers(checkpoint: ModelCheckpoint) -> dict[str, Reader]:
    """Return a reader for each tensor of the plain checkpoint, by name.

    Quantized tensors are dequantized to the checkpoint's dtype.
    """
    readers = tensor_readers(checkpoint.folder)
    if checkpoint.quantized is None:
        return readers
    return plain_readers(readers, checkpoint.quantized, _stored_dtype(checkpoint.config))


def tensor_readers(folder: Path) -> dict[str, Reader]:
    """Return a reader for each tensor, by name; the index selects the files if there is one."""
    return {name: partial(handle.get_tensor, name) for handle, name in _stored_tensors(folder)}


def _tensor_shapes(folder: Path) -> dict[str, list[int]]:
    return {name: handle.get_slice(name).get_shape() for handle, name in _stored_tensors(folder)}


def _stored_tensors(folder: Path) -> Iterator[tuple[Any, str]]:
    """Yield each open file with the name of a tensor in it. Raise ModelLoadError."""
    for file in weight_files(folder):
        try:
            handle: Any = safe_open(file, framework="pt")
            names = list(handle.keys())
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{file} cannot be read as safetensors: {error}") from error
        yield from ((handle, name) for name in names)


def weight_files(folder: Path) -> list[Path]:
    """Return the files with a model's tensors. Raise ModelLoadError."""
    index = folder / _INDEX
    if index.is_file():
        files = [folder / name for name in sorted(set(read_json(index).get("weight_map", {}).values()))]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ModelLoadError(
                f"{folder} lacks {len(missing)} of the files that {_INDEX} names, the first is {missing[0]}"
            )
    else:
        others = {file for pattern in _OTHERS for file in folder.glob(pattern)}
        files = sorted(set(folder.glob("*.safetensors")) - others)
    if problem := next(filter(None, map(pointer_problem, files)), None if files else weights_problem(folder)):
        raise ModelLoadError(problem)
    return files
