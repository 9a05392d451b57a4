"""Forecast how many KV blocks the running requests will need in the steps to come."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence

import numpy as np

from workers.engine.scheduling.kv_cache import KVCache
from workers.engine.scheduling.output_lengths import EDGES, Floats, OutputLengths
from workers.engine.scheduling.request import RequestState

_REFRESH_STEPS = 16  # between two calculations over all running requests
_SPARE = 1 / 32  # of the blocks, as a reserve
_CAUTION = 1.75  # standard deviations
_EASY = 0.5  # of the blocks: up to here admission is not paced
# The variance of lengths by their squared mean from which no pacing is needed; equal lengths: 0
_VARIED = 2 / 3


class AdmissionForecast:
    """The admission policy of a scarce cache: room until the end, by the survival of the batch.

    For points of time ahead it keeps the expected number of blocks in use: the size that each
    request will have then, times the probability that it still runs, and a margin for variance. A
    new request must fit at the peak (as in Gong et al. 2025, "Past-Future Scheduler"). The curves
    are recalculated every `_REFRESH_STEPS` steps, and updated in between as requests start and end.

    Requests of about the same length that are admitted together also end together, and only at that
    moment would the blocks be full. So such requests are admitted at a sustainable rate: one for
    each time that the blocks can serve a whole request.
    """

    def __init__(self, kv_cache: KVCache, max_num_seqs: int, max_model_len: int) -> None:
        self._lengths = OutputLengths()
        self._pool = kv_cache.pool
        self._size = kv_cache.block_size
        self._room = self.room_of(kv_cache)
        self._times = _times(max_model_len)
        self._most = 0  # blocks, if each running request reached its limit
        self._computed_at = -1  # the step of the last calculation; -1: none is valid
        self._shared = 0  # blocks shared by several requests
        # Blocks at each point of time: expected, their variance, and how many there may be; by
        # slot, and of all together.
        self._by_slot = np.zeros((3, max_num_seqs, len(self._times)))
        self._all = np.zeros((3, len(self._times)))
        self._survival_tables: dict[str, Floats] = {}  # by batch
        # The last candidate: id, known tokens, shared blocks, step of the calculation, curves
        self._candidate = (-1, -1, -1, -1, self._all)
        # The request without room before that step, unless another one ends
        self._refused, self._refused_until = -1, 0.0
        self._next = 0.0  # the step from which equal requests may be admitted again

    @staticmethod
    def room_of(kv_cache: KVCache) -> int:
        """Return how many blocks are given out by forecast; the others are a reserve."""
        return int((kv_cache.pool.num_blocks - 1) * (1 - _SPARE))

    def has_room(
        self, request: RequestState, prefix: Sequence[int], step: int, running: Sequence[RequestState], returning: int
    ) -> bool:
        if self._most + self._blocks(request.limit) <= self._room:
            return True
        if not self._is_fresh(step):
            self._recompute(step, running, returning)
        if request.id == self._refused and step < self._refused_until:
            return False
        request.shared = len(prefix)
        curves = self._curves_of(request, step)
        late = int(np.searchsorted(self._times, step - self._computed_at))
        expected, variance, most = (self._all + curves)[:, late:]
        need = np.minimum(expected + _CAUTION * np.sqrt(np.maximum(variance, 0.0)), most)
        peak = float(need.max()) + self._shared + self._pool.count_free(prefix)
        if peak > self._room or (peak > _EASY * self._room and step < self._next):
            self._refused, self._refused_until = request.id, math.inf if peak > self._room else self._next
            return False
        self._next = max(self._next, step - 1) + self._interval(
            request, curves[0, late:], self._times[late:] - (step - self._computed_at)
        )
        return True

    def enter(self, request: RequestState, step: int, revived: int) -> None:
        self._most += self._blocks(request.limit)
        if self._is_fresh(step):
            self._put(request.slot, self._curves_of(request, step))
            self._shared += revived

    def leave(self, request: RequestState) -> None:
        self._most -= self._blocks(request.limit)
        if self._computed_at >= 0:
            self._put(request.slot, 0.0)

    def learn(self, request: RequestState) -> None:
        self._lengths.learn(request)

    def _interval(self, request: RequestState, use: Floats, times: Floats) -> float:
        """Return the steps until the next admission, if later requests are like this one."""
        alive = use / (np.ceil(np.minimum(request.known + times, request.limit) / self._size) - request.shared)
        widths = np.diff(times)
        mean, half_square, area = (
            float(widths @ (curve[1:] + curve[:-1])) / 2 for curve in (alive, alive * times, use)
        )
        if not mean:
            return 0.0
        variance = 2 * half_square / mean**2 - 1
        return area / self._room * max(0.0, 1 - variance / _VARIED)

    def _is_fresh(self, step: int) -> bool:
        if self._computed_at >= 0 and step - self._computed_at >= _REFRESH_STEPS:
            self._computed_at = -1
        return self._computed_at >= 0

    def _put(self, slot: int, curves: Floats | float) -> None:
        self._all += curves - self._by_slot[:, slot]
        self._by_slot[:, slot] = curves
        self._refused = -1

    def _recompute(self, step: int, running: Sequence[RequestState], returning: int) -> None:
        self._computed_at, self._refused = step, -1
        self._survival_tables = {}
        self._by_slot[:] = 0.0
        if running:
            self._learn_from(running)
            for request in running:
                self._find_shared(request)
            self._by_slot[:, [request.slot for request in running]] = self._curves(running, step)
        self._all = self._by_slot.sum(axis=1)
        owned = sum(len(request.blocks) - request.shared for request in running)
        self._shared = max(0, self._pool.num_blocks - 1 - self._pool.num_free - returning - owned)

    def _learn_from(self, running: Iterable[RequestState]) -> None:
        outputs: dict[str, list[int]] = {}
        for request in running:
            if request.batch_id is not None:
                outputs.setdefault(request.batch_id, []).append(request.known - request.prompt_length)
        self._survival_tables = {
            batch_id: self._lengths.log_survival(batch_id, lengths) for batch_id, lengths in outputs.items()
        }

    def _find_shared(self, request: RequestState) -> None:
        """Count the blocks of a computed prefix that other requests use too.

        These are the first of its blocks, and they are not free when it ends.
        """
        blocks, ref_counts = request.blocks, self._pool.ref_counts
        if request.shared < len(blocks) and ref_counts[blocks[request.shared]] > 1:
            request.shared = bisect_left(blocks, True, request.shared, key=lambda block: ref_counts[block] == 1)

    def _curves_of(self, request: RequestState, step: int) -> Floats:
        """Return the curves of a request that is not running yet.

        They are cached until the next calculation, since a few steps matter little.
        """
        *asked, curves = self._candidate
        if asked != [request.id, request.known, request.shared, self._computed_at]:
            curves = self._curves([request], step)[:, 0]
            self._candidate = (request.id, request.known, request.shared, self._computed_at, curves)
        return curves

    def _curves(self, requests: Sequence[RequestState], step: int) -> Floats:
        """Return curves of each request's own blocks: [3, requests, times].

        For each point of time: the expected number, its variance and the maximum.
        """
        counts = np.array(
            [(request.known, request.limit, request.prompt_length, request.shared) for request in requests],
            dtype=np.float64,
        )
        known, limit, prompt, shared = (counts[:, i : i + 1] for i in range(4))
        length = known + np.maximum(self._times - (step - self._computed_at), 0.0)
        most = np.ceil(np.minimum(length, limit) / self._size) - shared
        most[:, 1:][length[:, 1:] >= limit] = 0.0
        alive = np.ones_like(most)
        batch_ids = {request.batch_id for request in requests}
        for batch_id in batch_ids - {None}:
            assert batch_id is not None
            rows = (
                [row for row, request in enumerate(requests) if request.batch_id == batch_id]
                if len(batch_ids) > 1
                else slice(None)
            )
            alive[rows] = self._survival(batch_id, length[rows] - prompt[rows], known[rows] - prompt[rows])
        expected = alive * most
        return np.stack([expected, expected * (most - expected), most])

    def _survival(self, batch_id: str, outputs: Floats, now: Floats) -> Floats:
        """Return the probability that requests of `now` output tokens reach `outputs`."""
        table = self._survival_tables.get(batch_id)
        if table is None:
            table = self._survival_tables[batch_id] = self._lengths.log_survival(batch_id, ())
        survival: Floats = np.exp(np.interp(outputs, EDGES, table) - np.interp(now, EDGES, table))
        return survival

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._size)


def _times(longest: int) -> Floats:
    """Return steps ahead: every 8, then 8 in each octave."""
    times = np.unique(np.concatenate([np.arange(0, 64, 8), np.floor(64 * 2 ** (np.arange(120) / 8))]))
    return times[: int(np.searchsorted(times, longest + _REFRESH_STEPS)) + 1].astype(np.float64)
