"""Estimates of a model's memory and GPUs before it is loaded."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.engine.messages.config import CPU_CACHE_BYTES, CPU_ENCODER_SEQUENCES, CPU_SEQUENCES, EngineConfig
from workers.engine.native.levels import processor_features
from workers.model_folder import MODULES, transformer_folder

_CPU_STEP_TOKENS, _BLOCK_SIZE = 1024, 16  # the engine's defaults
_GENERATORS = ("ForCausalLM", "LMHeadModel")  # suffixes of architecture names
_PROCESS_BYTES = 384 << 20  # a worker process with its engine core; about half of it is torch
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_FIRST_NUMBER = re.compile("[0-9]+")  # bits in the name of a type, such as BF16 and F8_E4M3
_BITS = ("bits", "w_bit", "num_bits")
_ACTIVATIONS = ("input_activations", "output_activations", "kv_cache_scheme")
_BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


@dataclass(frozen=True, slots=True)
class Needs:
    """The memory and GPUs that all replicas of a model take together."""

    memory: int  # bytes, an estimate
    gpus: int = 0
    used: int | None = None  # bytes of the loaded model now; None: `memory`

    @property
    def taken(self) -> int:
        """Return the bytes that the model takes now."""
        return self.memory if self.used is None else self.used

    @property
    def most(self) -> int:
        """Return the most bytes the model will take: its KV cache fills while it works."""
        return max(self.memory, self.taken)


def needs_of(engine: EngineConfig, replicas: int, most_cache: int = CPU_CACHE_BYTES) -> Needs:
    """Return an estimate; weights count only if the model's files are on this machine.

    `most_cache`: bytes for the KV cache of a replica, unless `engine` sets a size. On a GPU the
    weights and the KV cache are in GPU memory, which the worker checks itself.
    """
    ranks = replicas * engine.tensor_parallel_size
    if uses_gpus(engine.device):
        return Needs(ranks * _PROCESS_BYTES, ranks)
    folder = _folder(engine.model)
    if folder is None:
        return Needs(ranks * _PROCESS_BYTES)
    config = _config(folder)
    weights = _weight_bytes(folder, engine, config)
    return Needs(ranks * _PROCESS_BYTES + replicas * (weights + _cache_bytes(engine, config, most_cache)))


def cache_bytes_of(engine: EngineConfig, most: int) -> int:
    """Return the size of a replica's KV cache on a CPU, `most` if the model is not known yet."""
    folder = _folder(engine.model)
    return most if folder is None else _cache_bytes(engine, _config(folder), most)


def uses_gpus(device: str) -> bool:
    """Return whether a worker would take a GPU."""
    return device.startswith("cuda") or (device == "auto" and count_gpus() > 0)


def count_gpus() -> int:
    """Return the number of GPUs that this process and its children may use."""
    devices = len(list(Path("/dev").glob("nvidia[0-9]*")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return devices
    return min(devices, len([one for one in visible.split(",") if one.strip() not in ("", "-1")]))


def _folder(model: str) -> Path | None:
    """Return the folder of a model's files, or None if they are not on this machine."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return transformer_folder(folder)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        files = [try_to_load_from_cache(model, name) for name in (MODULES, "config.json")]
    except HFValidationError:
        return None
    found = next((file for file in files if isinstance(file, str)), None)
    return None if found is None else transformer_folder(Path(found).parent)


def _weight_bytes(folder: Path, engine: EngineConfig, config: Mapping[str, Any]) -> int:
    files = [file for file in folder.glob("*.safetensors") if not file.name.startswith("consolidated")]
    present = [file for file in files if file.is_file()]  # the worker refuses broken links
    settings = config.get("quantization_config") or config.get("compression_config")
    if settings:
        bits = min(_packed_bits(settings), default=8)  # fewest bits give the largest estimate, which is safe
        return sum(_count_numbers(file, bits) for file in present) * _item_bytes(engine, config)
    stored = sum(file.stat().st_size for file in present)
    return stored * _item_bytes(engine, config) // _ITEM_BYTES.get(_stored_dtype(config), 4)


def _count_numbers(file: Path, packed_bits: int) -> int:
    """Return about how many numbers a quantized checkpoint's file has after dequantization.

    Return 0 for an unreadable file; the worker refuses it.
    """
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(min(length, file.stat().st_size)))
        tensors = [tensor for name, tensor in header.items() if name != "__metadata__"]
        return sum(
            (tensor["data_offsets"][1] - tensor["data_offsets"][0])
            * 8
            // (packed_bits if tensor["dtype"] == "I32" else _bits_of(tensor["dtype"]))
            for tensor in tensors
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return 0


def _bits_of(dtype: str) -> int:
    found = _FIRST_NUMBER.search(dtype)
    return int(found[0]) if found else 8  # BOOL


def _packed_bits(settings: Any) -> Iterator[int]:
    """Yield each number of bits in a quantization_config."""
    if isinstance(settings, Mapping):
        for key, value in settings.items():
            if key in _BITS and isinstance(value, int) and value > 0:
                yield value
            elif key not in _ACTIVATIONS:
                yield from _packed_bits(value)


def _config(folder: Path) -> Mapping[str, Any]:
    try:
        found = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):  # the worker reports the error
        return {}
    return found if isinstance(found, dict) else {}


def _item_bytes(engine: EngineConfig, config: Mapping[str, Any]) -> int:
    narrow = _stored_dtype(config) == "bfloat16" and _has_bfloat16()
    return _ITEM_BYTES.get(engine.dtype, 2 if narrow else 4)


def _stored_dtype(config: Mapping[str, Any]) -> str:
    return str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")


def _cache_item_bytes(engine: EngineConfig, config: Mapping[str, Any]) -> int:
    """Return the bytes of a cached number; 2 also for a bfloat16 checkpoint run in float32."""
    narrow = engine.dtype == "auto" and _stored_dtype(config) == "bfloat16" and not _is_encoder(config)
    return 2 if narrow else _item_bytes(engine, config)


def _cache_bytes(engine: EngineConfig, config: Mapping[str, Any], most: int) -> int:
    """Return the size of the KV cache on a CPU, `most` if the shape is unknown."""
    if engine.kv_cache_memory_bytes is not None:
        return engine.kv_cache_memory_bytes
    try:
        heads = _first(config, "num_attention_heads", "n_heads")
        layers = int(_first(config, "num_hidden_layers", "n_layers"))
        size = int(config.get("head_dim") or _first(config, "hidden_size", "dim") // heads)
        kv_heads, block = int(config.get("num_key_value_heads") or heads), engine.block_size or _BLOCK_SIZE
        blocks = _cache_blocks(engine, config, block)
        return int(min(most, 2 * blocks * block * layers * kv_heads * size * _cache_item_bytes(engine, config)))
    except (KeyError, TypeError, ZeroDivisionError):
        return most


def _cache_blocks(engine: EngineConfig, config: Mapping[str, Any], block: int) -> int:
    """Return the most blocks that all requests can need; an encoder needs those of a step."""
    length = engine.max_model_len or config["max_position_embeddings"]
    if _is_encoder(config):
        sequences = engine.max_num_seqs or CPU_ENCODER_SEQUENCES
        return int(max(engine.max_num_batched_tokens or _CPU_STEP_TOKENS, length) // block + 2 * sequences + 1)
    return int((engine.max_num_seqs or CPU_SEQUENCES) * -(-length // block) + 1)


def _is_encoder(config: Mapping[str, Any]) -> bool:
    """Return whether a model is an encoder: its config.json has no key-value heads."""
    architectures = config.get("architectures") or []
    generates = not architectures or str(architectures[0]).endswith(_GENERATORS)
    return not generates and "num_key_value_heads" not in config


def _first(config: Mapping[str, Any], *names: str) -> Any:
    """Return the value of the first name that `config` has. Raise KeyError if it has none."""
    return config[next((name for name in names if name in config), names[0])]


def _has_bfloat16() -> bool:
    """Return whether `--dtype auto` keeps bfloat16 for a bfloat16 checkpoint on this CPU."""
    return not _BFLOAT16_FLAGS.isdisjoint(processor_features())
