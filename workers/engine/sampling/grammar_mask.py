"""Mask the logits that grammars rule out, by one bit per token, in plain torch for every device.

The sampler calls `Draw.apply_masks`. It uses this module unless a backend has a kernel: in C on a
CPU (`native/draw.py`), by Triton on a GPU (`kernels/fused_draw.py`).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.engine.cuda.staging import to_device

_BITS = 32


def apply_masks(logits: Tensor, rows: NDArray[np.int64], masks: NDArray[np.int32]) -> None:
    """Set tokens ruled out by `masks` [K, words] to minus infinity in `rows` [K] of contiguous
    float32 logits [R, vocab].

    Token t is allowed if bit t % 32 of word t

    32 is 1. Bits beyond the vocabulary are ignored. Raises ValueError for masks of another shape.
    """
    check_masks(logits, rows, masks)
    bits = np.unpackbits(np.ascontiguousarray(masks).view(np.uint8), 1, logits.shape[1], "little")
    ruled_out = to_device(bits == 0, logits.device)
    for row, of_row in zip(rows.tolist(), ruled_out, strict=True):
        logits[row].masked_fill_(of_row, -torch.inf)


def check_masks(logits: Tensor, rows: NDArray[np.int64], masks: NDArray[np.int32]) -> None:
    """Raise ValueError if masks or rows do not fit the logits."""
    count, vocab = logits.shape
    expected = (len(rows), -(-vocab // _BITS))
    if masks.shape != expected or masks.dtype != np.int32:
        raise ValueError(f"masks must be int32 {list(expected)}, got {masks.dtype} {list(masks.shape)}")
    if len(rows) and not 0 <= rows.min() <= rows.max() < count:
        raise ValueError(f"masks are of rows {rows.tolist()}, and there are {count}")
