"""Decode steps recorded as CUDA graphs: one launch in place of several hundred.

A step with one token per row is padded to the next of a few sizes. The device's work for such a
step depends only on the size: all else is read from memory. A size is recorded when it is first
needed. The largest is recorded first, so that the shared pool has the memory that the others need.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import Any

import torch

from workers.engine.cuda.out_of_memory import is_out_of_memory, one_line

logger = logging.getLogger(__name__)

Work = Callable[[], None]

_PATIENCE = 8
"""Steps' worth of padding rows that cost about as much as recording a size: one run outside a
graph, and the recording.
"""


class GraphVariant(Enum):
    """The end of a graph: the sampled tokens, the hidden states from which sampling by stages
    starts, or both, for steps in which some rows need stages.
    """

    TOKENS = "tokens"
    HIDDEN = "hidden"
    BOTH = "both"


class DecodeGraphs:
    """Runs `step(variant, rows)` for at least the given number of rows.

    `record` records a piece of work and returns a function that repeats it. Extra rows, and running
    a step twice, must have no effect.

    `forgiving`: if memory is too short to record a size, steps run without it. Ranks that wait for
    each other must all do the same, so they must not be forgiving.
    """

    def __init__(
        self,
        step: Callable[[GraphVariant, int], None],
        most: int,
        record: Callable[[Work], Work],
        forgiving: bool = True,
    ) -> None:
        self._step = step
        self._record = record
        self._sizes = sizes(most)
        self._recorded: dict[tuple[GraphVariant, int], Work] = {}
        # By size: rows of padding in steps that ran with a larger size
        self._padded: Counter[tuple[GraphVariant, int]] = Counter()
        self._forgiving = forgiving
        self._short = False

    def run(self, variant: GraphVariant, rows: int) -> None:
        """Run the staged step. Raises the step's errors."""
        self.prepare(variant)
        size = self._size(variant, rows)
        if self._try_to_record(variant, size):
            self._recorded[variant, size]()
        else:
            self._step(variant, size)

    def prepare(self, variant: GraphVariant) -> None:
        """Record the largest size, which also runs the staged step."""
        self._try_to_record(variant, self._sizes[-1])

    def _size(self, variant: GraphVariant, rows: int) -> int:
        fitting = self._sizes[bisect_left(self._sizes, rows)]
        recorded = next((size for size in self._sizes if size >= fitting and (variant, size) in self._recorded), None)
        if recorded is None or recorded == fitting or self._short:
            return recorded or fitting
        self._padded[variant, fitting] += recorded - fitting
        return fitting if recorded > 2 * fitting or self._padded[variant, fitting] > _PATIENCE * fitting else recorded

    def _try_to_record(self, variant: GraphVariant, size: int) -> bool:
        if (variant, size) in self._recorded:
            return True
        if self._short:
            return False
        try:
            self._recorded[variant, size] = self._record(partial(self._step, variant, size))
        except (MemoryError, RuntimeError) as error:
            if not self._forgiving or not any(is_out_of_memory(cause) for cause in _causes(error)):
                raise
            self._short = True
            logger.warning(
                "no more CUDA graphs are recorded: memory is too short for one of %d rows (%s)", size, one_line(error)
            )
        return (variant, size) in self._recorded


class CudaRecorder:
    """Records work on the current device.

    One pool and one stream serve all recordings, so that they share their memory.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        cuda: Any = torch.cuda
        self._stream = cuda.Stream()
        # Graphs whose recording failed are included: deleting a graph would free the stream's
        # workspace of cuBLAS, which all other graphs write to.
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def __call__(self, work: Work) -> Work:
        """Run the work once, so that kernels are compiled, tuned and loaded; then record it."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                work()
        finally:  # queued kernels of failed work must end before the current stream changes their inputs
            current.wait_stream(self._stream)
        # Memory cached for this stream would be unusable for the pool of the graphs.
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        self._graphs.append(graph)
        # Not torch.cuda.graph: if the recording fails, it leaves this stream the current one.
        with torch.cuda.stream(self._stream):
            graph.capture_begin(
                pool=self._pool, capture_error_mode="thread_local"
            )  # other threads, such as NCCL's, may use the device
            try:
                work()
            finally:
                self._end(graph)
        return graph.replay

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            graph.capture_end()
        except RuntimeError:
            # Before torch 2.12, the allocator then treats the recording as unfinished and never
            # empties its cache again.
            memory: Any = torch.cuda.memory
            with suppress(RuntimeError):
                memory._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
            raise


def steps_to_record(size: int, larger: int) -> int:
    """Return after how many steps of a size it is recorded, if the next `larger` size is."""
    return _PATIENCE * size // (larger - size) + 1


def sizes(most: int) -> list[int]:
    """Return 1, 2, 4, 8, 16, 24, ... 64, then four sizes per doubling, and `most` itself."""
    found = [1, 2, 4, *range(8, 65, 8)]
    while found[-1] < most:
        found.append(found[-1] + (1 << (found[-1].bit_length() - 3)))
    return [*(size for size in found if size < most), most]


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes: ending a failed recording can raise another error."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
