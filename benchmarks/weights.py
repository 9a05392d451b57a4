"""Random weights of a real shape, written within seconds at any size: one random block is repeated.

The block's length is a prime, so that no two rows of a matrix are the same. Matrices are normal
with a deviation of 0.02, norms are 1 and biases 0. bfloat16 throughout.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

_BLOCK = 33_554_467  # elements
_SHARD_BYTES = 4 << 30
_ITEM = 2  # bytes of a bfloat16
_ONE = np.uint16(0x3F80)  # 1.0 as a bfloat16
_DEVIATION = 0.02


def write_checkpoint(
    settings: Mapping[str, Any], folder: Path, seed: int = 0, auto_class: str = "AutoModelForCausalLM"
) -> int:
    """Write config.json and safetensors files for transformers' configuration `settings`; return
    the bytes of the weights. `auto_class` is transformers' name for the kind of model.

    Raises OSError if the disk has too little space.
    """
    config, shapes = shapes_of(settings, auto_class)
    size = sum(_bytes(shape) for shape in shapes.values())
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < 1.05 * size:
        raise OSError(f"{folder} has {free / 1e9:.1f} GB free, and the weights take {size / 1e9:.1f} GB")
    config.save_pretrained(folder)
    _write_shards(shapes, folder, seed)
    return size


def shapes_of(
    settings: Mapping[str, Any], auto_class: str = "AutoModelForCausalLM"
) -> tuple[Any, dict[str, tuple[int, ...]]]:
    """Return transformers' configuration of a checkpoint in bfloat16, and its tensors' shapes."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(**settings)
    with torch.device("meta"):
        model = getattr(transformers, auto_class).from_config(config, dtype=torch.bfloat16)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    config.architectures = [type(model).__name__]
    config.dtype = torch.bfloat16
    return config, shapes


def _write_shards(shapes: Mapping[str, Sequence[int]], folder: Path, seed: int) -> None:
    largest = max(prod(shape) for shape in shapes.values())
    block = _random_block(min(_BLOCK, largest + 1), seed)
    shards = list(_shards(shapes))
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        weight_map.update(dict.fromkeys(shard, name))
        with (folder / name).open("wb") as file:
            file.write(_header(shard))
            for tensor, shape in shard.items():
                _write_tensor(file, tensor, shape, block)
    if len(shards) > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _shards(shapes: Mapping[str, Sequence[int]]) -> Iterator[dict[str, Sequence[int]]]:
    shard: dict[str, Sequence[int]] = {}
    size = 0
    for name, shape in shapes.items():
        if shard and size + _bytes(shape) > _SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = shape
        size += _bytes(shape)
    yield shard


def _header(shard: Mapping[str, Sequence[int]]) -> bytes:
    """Return a safetensors header: its length in 8 bytes, then JSON, padded to a multiple of 8."""
    entries, offset = {}, 0
    for name, shape in shard.items():
        entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + _bytes(shape)]}
        offset += _bytes(shape)
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_tensor(file: BinaryIO, name: str, shape: Sequence[int], block: np.ndarray[Any, np.dtype[np.uint16]]) -> None:
    count = prod(shape)
    if len(shape) == 1:
        file.write(np.full(count, 0 if name.endswith("bias") else _ONE, np.uint16).tobytes())
        return
    start = sum(name.encode()) * 7919 % len(block)  # so that tensors differ
    while count:
        part = block[start : start + count]
        file.write(part.data)
        count -= len(part)
        start = 0


def _random_block(length: int, seed: int) -> np.ndarray[Any, np.dtype[np.uint16]]:
    values = np.random.default_rng(seed).standard_normal(length, np.float32) * np.float32(_DEVIATION)
    # A bfloat16 is a float32 without its lower half
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def _bytes(shape: Sequence[int]) -> int:
    return prod(shape) * _ITEM
