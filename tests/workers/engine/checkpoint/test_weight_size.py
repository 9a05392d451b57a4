"""Weights are counted and compared with config.json by the headers of their files."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.workers.engine.checkpoint.test_loading import edit
from tests.workers.engine.models.tiny_models import folder
from workers.engine.checkpoint.model_checkpoint import open_checkpoint, shard_checkpoint
from workers.engine.checkpoint.weight_size import weight_bytes
from workers.engine.device.executor import Executor
from workers.engine.layers.parallel import Parallel
from workers.engine.messages.config import EngineConfig
from workers.engine.messages.errors import ModelLoadError

FILE = "model.safetensors"


def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder("llama"), tmp_path / "model"))


def test_weights_are_counted_in_the_dtype_that_they_run_with(tmp_path: Path) -> None:
    path = copy(tmp_path)
    tensors = load_file(path / FILE)
    full = sum(tensor.nbytes for tensor in tensors.values())
    assert weight_bytes(open_checkpoint(str(path)), torch.float32) == full
    assert weight_bytes(open_checkpoint(str(path)), torch.bfloat16) == full // 2
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, path / FILE)
    assert weight_bytes(open_checkpoint(str(path)), torch.float32) == full
    norms = sum(tensor.nbytes for tensor in tensors.values() if tensor.dim() == 1)
    assert weight_bytes(open_checkpoint(str(path)), torch.float32, widens=True) == (full - norms) // 2 + norms


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_parts_of_ranks_are_all_of_the_weights(load_format: str) -> None:
    whole = open_checkpoint(str(folder("llama")), load_format=load_format)
    shared = shard_checkpoint(whole, 4)
    sizes = [weight_bytes(shared, torch.float32, parallel=Parallel(rank, 4)) for rank in range(4)]
    assert sum(sizes) >= weight_bytes(whole, torch.float32)
    assert max(sizes) < weight_bytes(whole, torch.float32)


def test_shapes_are_compared_with_config_json_before_numbers_are_read(tmp_path: Path) -> None:
    path = copy(tmp_path)
    edit(path / "config.json", intermediate_size=100)
    with pytest.raises(ModelLoadError, match=r"gate_proj\.weight' has shape \[96, 64\], but config\.json implies"):
        weight_bytes(open_checkpoint(str(path)), torch.float32)


def test_weights_that_memory_cannot_hold_are_refused_by_their_headers(tmp_path: Path) -> None:
    """The file is sparse, and larger than any memory."""
    path = copy(tmp_path)
    width = 1 << 32
    edit(path / "config.json", intermediate_size=width)
    raw = (path / FILE).read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    end = 0
    for name, tensor in header.items():
        if name != "__metadata__":
            tensor["shape"] = [width if "mlp" in name and size == 96 else size for size in tensor["shape"]]
            size = 4 * torch.Size(tensor["shape"]).numel()
            tensor["data_offsets"], end = [end, end + size], end + size
    text = json.dumps(header).encode()
    with (path / FILE).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    with pytest.raises(ModelLoadError, match=r"^weights of 9216\.00 GiB do not fit into the \d+\.\d\d GiB"):
        Executor(EngineConfig(model=str(path), device="cpu", threads=1, dtype="float32"))
