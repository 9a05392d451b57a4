"""The masks of a step: the tokens that each guided row may draw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from workers.engine.guides.guide import Guide
from workers.engine.guides.vocabulary import Vocabulary
from workers.engine.messages.step import TokenMasks

if TYPE_CHECKING:
    from llguidance import LLExecutor

_MOST_THREADS = 8

Guided = tuple[int, Guide]
"""A row of a step's samples, and the guide of its request."""


class MaskMaker:
    """Computes masks, if useful in another thread: the library releases the GIL."""

    def __init__(self, threads: int) -> None:
        self._num_threads = min(threads, _MOST_THREADS)

    def begin(self, vocabulary: Vocabulary, guided: Sequence[Guided]) -> Callable[[], TokenMasks]:
        """Start to compute the masks of some rows; return a function that waits for them."""
        future: Future[TokenMasks] = self._thread.submit(self.make, vocabulary, guided)
        return future.result

    def make(self, vocabulary: Vocabulary, guided: Sequence[Guided]) -> TokenMasks:
        """Return the masks of the rows that have one.

        A guide that fails has an empty mask; its `failure` says why.
        """
        masked = [(row, guide) for row, guide in guided if guide.in_grammar or guide.other_tokens()]
        masks = np.zeros((len(masked), vocabulary.library_words), np.int32)
        self._match(masks, [(index, guide) for index, (_, guide) in enumerate(masked) if guide.in_grammar])
        bits = masks.view(np.uint32)
        for index, (_, guide) in enumerate(masked):
            if (others := guide.other_tokens()) and not guide.failure():
                _allow(bits[index], others)
        rows = np.array([row for row, _ in masked], np.int64)
        return TokenMasks(rows, np.ascontiguousarray(masks[:, : vocabulary.words]))

    def _match(self, masks: NDArray[np.int32], matched: Sequence[Guided]) -> None:
        if not matched:
            return
        matchers: list[Any] = [(guide.matcher, index) for index, guide in matched]
        self._library.unsafe_compute_mask_ptr(matchers, masks.ctypes.data, 4 * masks.shape[1], len(masks))
        bits = masks.view(np.uint32)
        for index, guide in matched:
            if guide.failure():
                masks[index] = 0
            elif guide.may_end():
                _allow(bits[index], guide.ends)

    @cached_property
    def _library(self) -> LLExecutor:
        from llguidance import LLExecutor

        return LLExecutor(self._num_threads)

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "masks")


def _allow(mask: NDArray[np.uint32], tokens: Sequence[int]) -> None:
    for token in tokens:
        mask[token // 32] |= np.uint32(1 << token % 32)
