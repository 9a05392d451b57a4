"""Masks of every kind, what they leave by a bit at a time, and the check that a way to apply them
does just that.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SIZES = [1, 31, 32, 33, 257, 50_257, 151_936]
"""Of vocabularies: odd ones, and those of GPT-2 and Qwen."""

Masks = NDArray[np.int32]


def mask_of(allowed: NDArray[np.int64], vocab: int) -> Masks:
    """[words] with the bits of these tokens."""
    mask = np.zeros(-(-vocab // 32), np.uint32)
    np.bitwise_or.at(mask, allowed // 32, np.uint32(1) << (allowed % 32).astype(np.uint32))
    return mask.view(np.int32)


def every_kind(vocab: int) -> Masks:
    """[6, words]: all, none, a few, all but a few, at random, and in long runs of both."""
    draw, words = np.random.default_rng(vocab), -(-vocab // 32)
    few = mask_of(draw.integers(0, vocab, 3), vocab)
    random = draw.integers(-(2**31), 2**31, words).astype(np.int32)
    runs = np.repeat(draw.choice(np.array([0, -1], np.int32), words // 7 + 1), 7)[:words]
    return np.stack((np.full(words, -1, np.int32), np.zeros(words, np.int32), few, ~few, random, runs))


def check_masks_are_applied(
    apply: Callable[[Tensor, NDArray[np.int64], Masks], None], vocab: int, device: torch.device | str = "cpu"
) -> None:
    """Each kind on a row of its own, in another order than the rows', between rows without one."""
    masks = every_kind(vocab)
    rows = np.array([9, 1, 3, 4, 7, 5])
    logits = torch.randn(11, vocab, generator=torch.Generator().manual_seed(vocab))
    expected = logits.numpy().copy()
    for row, mask in zip(rows, masks, strict=True):
        allowed = [bool(int(mask[token // 32]) >> (token % 32) & 1) for token in range(min(vocab, 300))]
        allowed += np.unpackbits(mask.view(np.uint8), bitorder="little")[300:vocab].astype(bool).tolist()
        expected[row, ~np.array(allowed)] = -np.inf
    got = logits.to(device)
    apply(got, rows, masks)
    np.testing.assert_array_equal(got.cpu().numpy(), expected)
