"""Mask logits by grammar, with one bit per token; logits of allowed tokens are not accessed."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_WORDS = 64  # words of one program
_BITS = tl.constexpr(32)


def mask_rows(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Set the logits of forbidden tokens to minus infinity, in place.

    Masks int32 [K, words] apply to rows int64 [K] of logits [R, vocab]; `sampling.grammar_mask`
    defines the bits.
    """
    count, words = masks.shape
    if count:
        grid = (count, triton.cdiv(words, _WORDS))
        _mask_rows[grid](logits, rows, masks, logits.stride(0), logits.shape[1], words, _WORDS, num_warps=4)


@triton.jit
def _mask_rows(logits, rows, masks, stride, vocab, words, WORDS: tl.constexpr):
    item = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)[:, None]
    bit = tl.arange(0, _BITS)[None, :]
    mask = tl.load(masks + item * words + word, word < words, -1)
    token = word * _BITS + bit
    ruled_out = (((mask >> bit) & 1) == 0) & (token < vocab)
    tl.store(logits + tl.load(rows + item) * stride + token, float("-inf"), ruled_out)
