"""Masks of grammars by Triton's kernel against their definition."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.workers.engine.kernels.devices import DEVICE
from tests.workers.engine.sampling.masks import SIZES, check_masks_are_applied
from workers.engine.kernels.fused_draw import FusedDraw


def apply(logits: Tensor, rows: NDArray[np.int64], masks: NDArray[np.int32]) -> None:
    FusedDraw(1, logits.shape[1], DEVICE).apply_masks(logits, rows, masks)


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 257, 5000])
def test_equals_the_definition(vocab: int) -> None:
    check_masks_are_applied(apply, vocab, DEVICE)


def test_no_rows() -> None:
    logits = torch.randn(2, 40, device=DEVICE)
    before = logits.clone()
    apply(logits, np.empty(0, np.int64), np.empty((0, 2), np.int32))
    assert logits.equal(before)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", SIZES)
def test_real_vocabularies(vocab: int) -> None:
    check_masks_are_applied(apply, vocab, DEVICE)
