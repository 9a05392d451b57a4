"""A checkpoint of GPT-2's family as the one file that llama.cpp reads: GGUF, version 3, matrices in
a dtype of 16 bits or in blocks of int8, the rest as float32.

The format: github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from struct import pack
from typing import Any

import torch
from safetensors.torch import load_file

_ALIGNMENT = 32
_U32, _F32, _STRING, _ARRAY = 4, 6, 8, 9  # types of a value
_TYPES = {"float32": 0, "float16": 1, "q8_0": 8, "bfloat16": 30}  # of a tensor
_Q8_BLOCK = 32  # numbers with one scale
_NAMES = {
    "wte": "token_embd",
    "wpe": "position_embd",
    "ln_f": "output_norm",
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}


@dataclass(frozen=True, slots=True)
class _Stored:
    shape: tuple[int, ...]
    kind: str
    data: bytes


def write_gguf(folder: Path, path: Path, kind: str) -> None:
    """Write the checkpoint in `folder` to `path`, with matrices as float16, bfloat16 or q8_0.

    The head is the embedding, as in GPT-2.
    """
    weights = load_file(folder / "model.safetensors")
    tensors = {_name(name): encode_tensor(name, tensor, kind) for name, tensor in weights.items()}
    config = json.loads((folder / "config.json").read_text())
    settings = _settings(config) | _tokenizer(json.loads((folder / "tokenizer.json").read_text()), config["vocab_size"])
    header = b"GGUF" + pack("<IQQ", 3, len(tensors), len(settings))
    header += b"".join(_text(key) + _value(value) for key, value in settings.items())
    offset = 0
    for name, tensor in tensors.items():
        dimensions = len(tensor.shape)
        layout = (dimensions, *reversed(tensor.shape), _TYPES[tensor.kind], offset)
        header += _text(name) + pack(f"<I{dimensions}QIQ", *layout)
        offset += _padded(len(tensor.data))
    with path.open("wb") as file:
        file.write(header.ljust(_padded(len(header)), b"\0"))
        for tensor in tensors.values():
            file.write(tensor.data.ljust(_padded(len(tensor.data)), b"\0"))


def _settings(config: dict[str, int | float]) -> dict[str, int | float | str]:
    return {
        "general.architecture": "gpt2",
        "gpt2.context_length": config["n_positions"],
        "gpt2.embedding_length": config["n_embd"],
        "gpt2.feed_forward_length": 4 * config["n_embd"],
        "gpt2.block_count": config["n_layer"],
        "gpt2.attention.head_count": config["n_head"],
        "gpt2.attention.layer_norm_epsilon": config["layer_norm_epsilon"],
    }


def _tokenizer(tokenizer: dict[str, Any], vocabulary_size: int) -> dict[str, str | list[str]]:
    ids: dict[str, int] = tokenizer["model"]["vocab"]
    tokens = sorted(ids, key=ids.__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens + [f"[PAD{index}]" for index in range(len(tokens), vocabulary_size)],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in tokenizer["model"]["merges"]],
    }


def _name(name: str) -> str:
    """Return the name in GGUF: `transformer.h.3.attn.c_proj.weight`: `blk.3.attn_output.weight`."""
    module, _, kind = name.removeprefix("transformer.").rpartition(".")
    if not module.startswith("h."):
        return f"{_NAMES[module]}.{kind}"
    _, layer, part = module.split(".", 2)
    return f"blk.{layer}.{_NAMES[part]}.{kind}"


def encode_tensor(name: str, tensor: torch.Tensor, kind: str) -> _Stored:
    """Return a weight with rows as outputs; GPT-2 stores its projections transposed."""
    if ".h." in name and tensor.dim() == 2:
        tensor = tensor.T.contiguous()
    if tensor.dim() == 1 or (kind == "q8_0" and ".wpe." in name):
        kind = "float32"
    numbers = _in_blocks(tensor) if kind == "q8_0" else tensor.to(getattr(torch, kind))
    return _Stored(tuple(tensor.shape), kind, numbers.view(torch.uint8).numpy().tobytes())


def _in_blocks(tensor: torch.Tensor) -> torch.Tensor:
    """Return each block of a row as the bytes of its scale in float16 and of its int8 numbers."""
    blocks = tensor.float().view(-1, _Q8_BLOCK)
    scales = blocks.abs().amax(1, keepdim=True) / 127
    whole = (blocks / scales.clamp(min=1e-30)).round().to(torch.int8)
    return torch.cat((scales.half().view(torch.uint8), whole.view(torch.uint8)), 1)


def _text(text: str) -> bytes:
    encoded = text.encode()
    return pack("<Q", len(encoded)) + encoded


def _value(value: int | float | str | list[str]) -> bytes:
    if isinstance(value, list):
        return pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(map(_text, value))
    if isinstance(value, str):
        return pack("<I", _STRING) + _text(value)
    return pack("<II", _U32, value) if isinstance(value, int) else pack("<If", _F32, value)


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
