"""Advance guides and make their masks beside the core's thread.

A step waits for its guides, but not long: a row whose mask is late is left out, and comes in a
later step. A guide whose tokens take long is followed at a low priority, and no step waits for it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cached_property

import numpy as np

from workers.engine.guides.guide import Guide
from workers.engine.messages.step import NO_MASKS, TokenMasks

_MOST_THREADS = 8
_SPARE_THREADS = 4
"""Further threads for other guides while some are late."""
_PATIENCE, _LEAST_PATIENCE = 0.1, 0.0005
"""Share of a step's time, and the fewest seconds, that it waits for guides: once for their last
tokens, and once for their masks. A guide that needs more for a token is slow.
"""
_NICE = 10
"""A tenth of the share of a thread of the model. At 19 a thread would hold the GIL for too long."""

Drawn = tuple[Guide, int]
"""A guide, and the token that was drawn for it."""


class GuideThreads:
    """Threads for guides. The library releases the GIL."""

    def __init__(self, threads: int) -> None:
        self.woken: Callable[[], None] = lambda: None
        """Called in another thread when a guide is ready that was late."""
        self._num_threads = min(threads, _MOST_THREADS)
        self._num_slow_threads = max(1, self._num_threads // 2)
        self._patience = _LEAST_PATIENCE
        self._followed = 0.0  # time of the last `follow`
        self._progress = threading.Event()

    def begin(self, guide: Guide) -> None:
        """Start to make the first mask of a guide."""
        guide.work = self._threads.submit(self._prepare, [guide])

    def follow(self, drawn: Sequence[Drawn]) -> None:
        """Advance guides by tokens, then start to make their next masks.

        Return once they have advanced, but do not wait long, and for no slow guide.
        """
        for guide, _ in drawn:
            guide.advanced = guide.ready = False
        # A thread changes `slow` as soon as it has a guide.
        slow, quick = [item for item in drawn if item[0].slow], [item for item in drawn if not item[0].slow]
        for part in _parts(slow, self._num_slow_threads):
            work = self._slow_threads.submit(self._follow_in_turn, part)
            for guide, _ in part:
                guide.work = work
        advanced: list[threading.Event] = []
        for part in _parts(quick, self._num_threads):
            advanced.append(threading.Event())
            work = self._threads.submit(self._follow, part, advanced[-1])
            for guide, _ in part:
                guide.work = work
        self._followed = time.monotonic()
        until = self._followed + self._patience
        for event in advanced:
            event.wait(max(0.0, until - time.monotonic()))

    def wait_for(self, guides: Sequence[Guide]) -> None:
        """Wait until one of these guides is ready."""
        while not any(guide.ready for guide in guides):
            self._progress.wait()
            self._progress.clear()

    def masks(self, guided: Sequence[tuple[int, Guide]], step_seconds: float = 0.0) -> tuple[TokenMasks, set[Guide]]:
        """Return the masks of some of a step's samples, and the guides that are late.

        A late guide, or one that fails, has an empty mask. A guide that allows all tokens has none.
        `step_seconds` is the time of the step, which may have begun with the last `follow`.
        """
        self._patience = max(_LEAST_PATIENCE, _PATIENCE * step_seconds)
        works = {guide.work for _, guide in guided if not (guide.ready or guide.slow)}
        if works:
            left = max(0.0, self._followed + step_seconds - time.monotonic())
            wait([work for work in works if work is not None], left + self._patience)
        late = {guide for _, guide in guided if not guide.ready}
        masked = [(row, guide) for row, guide in guided if guide in late or guide.mask_error or guide.mask is not None]
        if not masked:
            return NO_MASKS, late
        masks = np.zeros((len(masked), masked[0][1].words), np.int32)
        for mask, (_, guide) in zip(masks, masked, strict=True):
            if guide not in late and not guide.mask_error and guide.mask is not None:
                mask[:] = guide.mask
        return TokenMasks(np.array([row for row, _ in masked], np.int64), masks), late

    def _follow_in_turn(self, drawn: Sequence[Drawn]) -> None:
        for item in drawn:
            self._follow([item], threading.Event())

    def _follow(self, drawn: Sequence[Drawn], advanced: threading.Event) -> None:
        for guide, token in drawn:
            guide.take(token)
        advanced.set()
        self._prepare([guide for guide, _ in drawn])

    def _prepare(self, guides: Sequence[Guide]) -> None:
        for guide in guides:
            guide.prepare(self._patience)
        if any(guide.awaited for guide in guides):
            self._progress.set()
            self.woken()

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._num_threads + _SPARE_THREADS, "masks")

    @cached_property
    def _slow_threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._num_slow_threads, "slow-masks", _give_way)


def _parts(drawn: Sequence[Drawn], most: int) -> Iterator[Sequence[Drawn]]:
    """Divide guides among at most so many threads."""
    size = -(-len(drawn) // most) or 1
    return (drawn[first : first + size] for first in range(0, len(drawn), size))


def _give_way() -> None:
    """Lower the priority of this thread. Only Linux has a priority by thread."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
