"""Choose the tiles of `TritonAttention` by timing rows of the model's shape on the GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch

from workers.engine.attention.base import CacheShape, DeviceMetadata
from workers.engine.cache_folder import cache_folder
from workers.engine.cuda.graphs import CudaRecorder
from workers.engine.kernels import attention as kernels
from workers.engine.kernels.paged_attention import TritonAttention
from workers.engine.kernels.tuning import ChoiceCache, TileChoice, candidates, tuned
from workers.engine.layers.base import AttentionShape

_POOL_BYTES = 256 << 20  # of keys and values: several times the size of a GPU's cache
_DECODED = (128, 512, 4096)  # rows, and their shortest and longest context
_PROMPT = 4096
# Recorded one after the other: the host takes longer to launch a call than a small model's takes
_CALLS = 8
_RUNS = 20


def choices(shape: CacheShape, num_heads: int, dtype: torch.dtype, device: torch.device) -> dict[str, TileChoice]:
    """Return the tiles of "decode" and "prefill" steps; without a GPU, the usual ones."""
    return dict(_choices(replace(shape, num_blocks=1, page_keys=None), num_heads, dtype, device))


@cache  # in case no file can be written: a replica creates its attention twice
def _choices(shape: CacheShape, num_heads: int, dtype: torch.dtype, device: torch.device) -> dict[str, TileChoice]:
    group = num_heads // shape.kv_heads
    offered = {kind: candidates(kind, shape.head_dim, group, dtype, shape.dtype) for kind in ("decode", "prefill")}
    if device.type != "cuda":
        return {kind: among[0] for kind, among in offered.items()}
    known = ChoiceCache(cache_folder(), torch.cuda.get_device_name(device), Path(kernels.__file__).read_text())
    kept = "" if shape.dtype in (None, dtype) else f" over {shape.dtype}"
    name = f"heads of {shape.head_dim}, {shape.kv_heads} with {group} each, {dtype}{kept}, blocks of {shape.block_size}"
    with torch.cuda.device(device):
        measured = _Measured(shape, num_heads, dtype, device)
        chosen = {
            kind: tuned(known, f"{kind}, {name}", among, partial(measured, kind)) for kind, among in offered.items()
        }
        del measured
        torch.cuda.empty_cache()  # free memory determines the size of the model's own cache
    return chosen


class _Measured:
    """Measures the seconds of a step of random rows with a choice of tiles.

    Memory is allocated for the first measurement.
    """

    def __init__(self, shape: CacheShape, num_heads: int, dtype: torch.dtype, device: torch.device) -> None:
        block_bytes = shape.block_bytes(shape.stored_dtype(dtype))
        self._shape = replace(shape, num_blocks=max(64, _POOL_BYTES // block_bytes))
        self._heads, self._dtype, self._device = num_heads, dtype, device
        self._cache: torch.Tensor | None = None

    def __call__(self, kind: str, choice: TileChoice) -> float:
        attention = TritonAttention(self._shape, self._heads, self._dtype, self._device, {kind: choice})
        if self._cache is None:
            (self._cache,) = attention.new_cache(1)
            self._cache.copy_(torch.randn(self._cache.shape, dtype=self._dtype, device=self._device))
        layer_cache = self._cache
        metadata = self._metadata(kind)
        q = torch.randn(
            (int(metadata.query_start[-1]), self._heads, self._shape.head_dim), dtype=self._dtype, device=self._device
        )
        its = self._shape
        shape = AttentionShape(self._heads, its.kv_heads, its.head_dim, its.head_dim**-0.5)

        def calls() -> None:
            for _ in range(_CALLS):
                attention.attend(q, layer_cache, metadata, shape)

        replay = CudaRecorder()(calls)
        replay()
        marks = [torch.Event(self._device, enable_timing=True) for _ in range(_RUNS + 1)]
        marks[0].record()
        for mark in marks[1:]:
            replay()
            mark.record()
        marks[-1].synchronize()
        return median(before.elapsed_time(after) for before, after in pairwise(marks)) / 1e3 / _CALLS

    def _metadata(self, kind: str) -> DeviceMetadata:
        rows, shortest, longest = _DECODED if kind == "decode" else (1, _PROMPT, _PROMPT)
        queries = 1 if kind == "decode" else _PROMPT
        columns = -(-longest // self._shape.block_size)
        contexts = torch.linspace(shortest, longest, rows, device=self._device).int()
        tables = torch.randint(1, self._shape.num_blocks, (rows, columns), dtype=torch.int32, device=self._device)
        order = torch.arange(rows + 1, dtype=torch.int32, device=self._device)
        return DeviceMetadata(order.long(), order * queries, contexts, order[:-1], tables, queries, longest)
