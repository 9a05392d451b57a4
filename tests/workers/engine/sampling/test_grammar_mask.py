"""Masks of grammars in plain torch against their definition."""

import numpy as np
import pytest
import torch

from tests.workers.engine.sampling.masks import SIZES, check_masks_are_applied, every_kind
from workers.engine.sampling.grammar_mask import apply_masks


@pytest.mark.parametrize("vocab", SIZES)
def test_equals_the_definition(vocab: int) -> None:
    check_masks_are_applied(apply_masks, vocab)


def test_no_rows() -> None:
    logits = torch.randn(2, 40)
    before = logits.clone()
    apply_masks(logits, np.empty(0, np.int64), np.empty((0, 2), np.int32))
    assert logits.equal(before)


def test_masks_of_another_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match=r"masks must be int32 \[6, 9\], got int32 \[6, 8\]"):
        apply_masks(torch.zeros(6, 257), np.arange(6), every_kind(256))


def test_rows_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match=r"masks are of rows \[0, 6\], and there are 6"):
        apply_masks(torch.zeros(6, 257), np.array([0, 6]), every_kind(257)[:2])
