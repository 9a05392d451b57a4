"""Rows for the attention kernel alone, in the shape of one layer of Qwen3-8B, called as the model's
layers call it.

Blocks of a row are scattered over the cache, as after hours of work. A call also writes the step's
own keys and values, as it does in the engine; that is counted in its time and not in its bytes and
operations.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.setting import Setting
from benchmarks.gpu.timing import median_seconds
from workers.engine.attention.base import CacheShape, DeviceMetadata
from workers.engine.backends.registry import find_backend
from workers.engine.layers.base import AttentionShape

BLOCK = 16  # tokens
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


class PagedLayer:
    """One layer's cache of random keys and values, for `rows` requests of `context` tokens."""

    def __init__(self, setting: Setting, rows: int, context: int) -> None:
        self.device = torch.device(setting.device)
        self.heads, self.kv_heads, self.dim = (4, 2, 16) if setting.tiny else (HEADS, KV_HEADS, HEAD_DIM)
        self.dtype = torch.float32 if setting.tiny else torch.bfloat16
        per_row = context // BLOCK
        shape = CacheShape(rows * per_row + 1, BLOCK, self.kv_heads, self.dim)
        self.attention = find_backend("triton").attention(shape, self.heads, self.dtype, self.device)
        (self.cache,) = self.attention.new_cache(1)
        self.cache.normal_(generator=torch.Generator(self.device).manual_seed(0))
        order = torch.randperm(rows * per_row, generator=torch.Generator().manual_seed(0)) + 1
        self.tables = order.to(torch.int32).view(rows, per_row).to(self.device)

    def step(self, contexts: list[int], query: int) -> DeviceMetadata:
        """Return the metadata of a step with the last `query` tokens of each row.

        Row i has `contexts[i]` tokens.
        """
        lengths = torch.tensor(contexts, dtype=torch.int32, device=self.device)
        rows = torch.arange(len(contexts), device=self.device)
        positions = lengths.long()[:, None] - query + torch.arange(query, device=self.device)
        blocks = self.tables.long()[rows[:, None], positions // BLOCK]
        starts = torch.arange(len(contexts) + 1, dtype=torch.int32, device=self.device) * query
        mapping = (blocks * BLOCK + positions % BLOCK).flatten()
        return DeviceMetadata(
            mapping, starts, lengths, rows.int(), self.tables, max_query=query, max_context=max(contexts)
        )

    def seconds(self, metadata: DeviceMetadata, calls: int) -> float:
        """Return the seconds of one call for the step."""
        q, k, v = self.inputs(metadata.slot_mapping.shape[0])
        shape = AttentionShape(self.heads, self.kv_heads, self.dim, self.dim**-0.5)
        return median_seconds(
            lambda: self.attention.forward(q, k, v, self.cache, metadata, shape),
            self.device,
            calls,
        )

    def inputs(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v of a step's tokens."""
        total = self.heads + 2 * self.kv_heads
        qkv = torch.randn(tokens, total, self.dim, device=self.device, dtype=self.dtype)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        return q, k, v


def decode(setting: Setting) -> dict[str, Any]:
    """Measure one token each of 256 rows: bytes of keys and values read per second, for even
    contexts and mixed ones; the worst counts.
    """
    rows, lengths, calls = (3, (16, 48), 1) if setting.tiny else (256, (1024, 2048, 4096, 8192), 20)
    layer = PagedLayer(setting, rows, max(lengths))
    draw = torch.Generator().manual_seed(1)
    cases = {str(length): [length] * rows for length in lengths}
    cases["mixed"] = torch.randint(min(lengths), max(lengths) + 1, (rows,), generator=draw).tolist()
    per_token = 2 * layer.kv_heads * layer.dim * layer.dtype.itemsize
    rates = {
        name: sum(contexts) * per_token / layer.seconds(layer.step(contexts, 1), calls)
        for name, contexts in cases.items()
    }
    figures: dict[str, Any] = {
        "gigabytes_per_second": {name: round(rate / 1e9, 1) for name, rate in rates.items()},
        "rows": rows,
        "how": (
            f"{rows} rows of one token, {layer.heads} heads over {layer.kv_heads}, {layer.dim} wide, blocks of {BLOCK};"
            " bytes of keys and values over the time of a call (the write of the new ones included), median by CUDA"
            f" events; the worst of the contexts {', '.join(cases)}"
        ),
        "value": round(min(rates.values()) / 1e9, 1),
    }
    if setting.gpu is not None:
        figures["bound"] = round(setting.gpu.copy_bytes_per_second / 1e9, 1)
    return figures


def prefill(setting: Setting) -> dict[str, Any]:
    """Measure a prompt at once, against torch's SDPA with its FlashAttention backend on the same
    numbers; the row's figure is the worst ratio.
    """
    lengths, calls = ((32,), 1) if setting.tiny else ((4096, 8192, 16384), 10)
    layer = PagedLayer(setting, 1, max(lengths))
    cases = {}
    for length in lengths:
        ours, theirs = layer.seconds(layer.step([length], length), calls), _sdpa_seconds(layer, length, calls)
        operations = 4 * layer.heads * layer.dim * length * (length + 1) / 2
        cases[str(length)] = {
            "milliseconds": round(1e3 * ours, 3),
            "sdpa_milliseconds": round(1e3 * theirs, 3),
            "tflops": round(operations / ours / 1e12, 1),
            "ratio": round(theirs / ours, 3),
        }
    return {
        "lengths": cases,
        "value": min(case["ratio"] for case in cases.values()),
        "how": (
            f"one row of {', '.join(map(str, lengths))} tokens, causal, {layer.heads} heads over {layer.kv_heads},"
            f" {layer.dim} wide; torch's scaled_dot_product_attention with SDPBackend.FLASH_ATTENTION on unpaged"
            " tensors, its time over ours (which also writes the cache); medians by CUDA events; the worst of the"
            " lengths"
        ),
    }


def _sdpa_seconds(layer: PagedLayer, length: int, calls: int) -> float:
    # [1, heads, T, d]
    q, k, v = (part.transpose(0, 1)[None].contiguous() for part in layer.inputs(length))
    # For a backend that requires as many heads of keys as of queries
    if layer.device.type == "cpu":
        k, v = (part.repeat_interleave(layer.heads // layer.kv_heads, 1) for part in (k, v))
    grouped = k.shape[1] != q.shape[1]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return median_seconds(
            lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped), layer.device, calls
        )
