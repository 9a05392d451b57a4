"""Choose the tiles of the attention kernel.

There are a few candidates by head size, group and dtypes. They are timed on the GPU at the first
start with a shape, and the fastest is stored on disk.

The file is JSON. There is one for each GPU, version of Triton and source of the kernels, so that a
choice is valid only for them. Processes that start together wait until the first has measured.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import torch
import triton
from triton.errors import TritonError

from workers.engine.cache_folder import locked

logger = logging.getLogger(__name__)

# Bytes of a head's key in the candidates below: 128 numbers of 16 bits
_ROW_BYTES = 256
_CANDIDATES = {  # block_m, tile, warps, stages; the first is the default without a GPU
    "decode": ((16, 64, 4, 3), (16, 128, 4, 2), (16, 64, 4, 4), (16, 32, 4, 4), (16, 128, 8, 2)),
    "prefill": ((128, 64, 8, 3), (128, 64, 8, 2), (128, 128, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3)),
}


@dataclass(frozen=True, slots=True)
class TileChoice:
    """The constants with which `attend` is compiled for one kind of step."""

    block_m: int  # rows of the matrix tile: queries times heads of a group
    tile: int  # keys per iteration
    warps: int
    stages: int  # iterations whose loads are in flight or in use


def candidates(
    kind: str, head_dim: int, group: int, dtype: torch.dtype, cache_dtype: torch.dtype | None = None
) -> list[TileChoice]:
    """Return the candidates for a `kind` of step, "decode" (one token per row) or "prefill".

    Larger heads have smaller tiles. Smaller heads have larger tiles only in decode steps, which are
    limited by memory bandwidth; prefill steps are limited by registers. So decode steps with a
    narrower cache have candidates of both sizes.
    """
    found = []
    sizes = {dtype.itemsize, (cache_dtype or dtype).itemsize} if kind == "decode" else {dtype.itemsize}
    for size, (block_m, tile, warps, stages) in product(sorted(sizes, reverse=True), _CANDIDATES[kind]):
        row_bytes = triton.next_power_of_2(head_dim) * size
        tile = max(16, min(128 if kind == "decode" else tile, tile * _ROW_BYTES // row_bytes))
        if dtype == torch.float32 and kind == "prefill":  # three products instead of one need registers
            block_m, tile, warps, stages = max(16, 64 * _ROW_BYTES // row_bytes), min(tile, 32), 4, 2
        choice = TileChoice(max(block_m, triton.next_power_of_2(group)), tile, warps, stages)
        if choice not in found:
            found.append(choice)
    return found


class ChoiceCache:
    """Choices by name in a file of `folder`.

    An invalid file is logged and replaced.
    """

    def __init__(self, folder: Path, gpu: str, source: str) -> None:
        self._header = {
            "card": gpu,
            "triton": triton.__version__,
            "source": hashlib.sha256(source.encode()).hexdigest(),
        }
        name = hashlib.sha256(json.dumps(self._header).encode()).hexdigest()[:16]
        self.path = folder / f"attention-{name}.json"

    def get(self, name: str, among: Sequence[TileChoice]) -> TileChoice | None:
        known = self._read().get(name)
        return next((choice for choice in among if asdict(choice) == known), None)

    def put(self, name: str, choice: TileChoice) -> None:
        """Store a choice in the file. Raise OSError."""
        content = json.dumps({**self._header, "choices": {**self._read(), name: asdict(choice)}}, indent=2)
        temporary = self.path.with_suffix(f".{os.getpid()}")
        temporary.write_text(content)
        temporary.replace(self.path)

    def _read(self) -> dict[str, object]:
        try:
            content = json.loads(self.path.read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            logger.warning("ignoring the tuned kernels in %s, which cannot be read: %s", self.path, error)
            return {}
        fits = isinstance(content, dict) and isinstance(content.get("choices"), dict)
        if not fits or {name: content.get(name) for name in self._header} != self._header:
            logger.warning(
                "ignoring the tuned kernels in %s, which were not written by this version for this GPU", self.path
            )
            return {}
        return dict(content["choices"])


def tuned(
    cache: ChoiceCache, name: str, among: Sequence[TileChoice], measure: Callable[[TileChoice], float]
) -> TileChoice:
    """Return the cached choice of `name`, else measure, store and return the fastest.

    A choice that does not compile for the GPU, or exceeds its registers or shared memory, is
    skipped; if all are skipped, the first is used.
    """
    with locked(cache.path):
        known = cache.get(name, among)
        if known is not None:
            return known
        started = time.monotonic()
        seconds = {}
        for choice in among:
            try:
                seconds[choice] = measure(choice)
            except (TritonError, torch.OutOfMemoryError) as error:
                logger.info("tuning: skipping %s for %s: %s", choice, name, error)
        if not seconds:
            return among[0]
        best = min(seconds, key=seconds.__getitem__)
        logger.info("tuned attention for %s in %.1f s: %s", name, time.monotonic() - started, best)
        try:
            cache.put(name, best)
        except OSError as error:
            logger.info("the tuning result cannot be saved: %s", error)
        return best
