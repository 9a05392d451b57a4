"""Forecast which batch requests may start while KV pages are scarce."""

from collections import deque
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from workers.engine.messages.core import Finish
from workers.engine.scheduling.cache import Prefix, SchedulerCache
from workers.engine.scheduling.request import RequestState

Floats = NDArray[np.float64]
_STEP_COST = 64.0  # tokens, until it is measured
_REFRESH_STEPS = 16  # between two calculations over all running requests
_UNPACED, _VARIED = 0.5, 0.5  # requests start together below so many pages, or so much variance
_GUESS, _RECENT, _BATCHES = [(256, True)] * 2, 256, 64  # ended outputs: at first, by batch; batches


class OutputLengths:
    """Estimate the lengths of outputs by batch, from ended and running requests."""

    def __init__(self) -> None:
        self._ended: dict[str, deque[tuple[int, bool]]] = {}  # output tokens, and whether it ended by itself

    def learn(self, request: RequestState) -> None:
        """Record an output that ended. An abort is due to a stop string, so it counts as an end."""
        output = len(request.tokens) - request.prompt_length
        if output > 0 and request.batch_id is not None and request.finish < Finish.ERROR:
            ended = self._ended.pop(request.batch_id, None) or deque(_GUESS, maxlen=_RECENT)
            self._ended[request.batch_id] = ended  # ordered by last update
            ended.append((output, request.finish is not Finish.LENGTH))
            if len(self._ended) > _BATCHES:
                del self._ended[next(iter(self._ended))]

    def log_survival(self, batch_id: str, running: Sequence[float]) -> tuple[Floats, Floats]:
        """Return lengths, and the log of the share of longer outputs (Kaplan-Meier)."""
        counts = sorted([*self._ended.get(batch_id, _GUESS), *((output, False) for output in running)])
        lengths, ended = np.array(counts, dtype=np.float64).T
        log = np.cumsum(np.log1p(-ended / (np.arange(len(counts), 0, -1) + 0.5)))
        tail = 8 * lengths.sum() / (ended.sum() + 1)  # beyond the longest, the mean rate applies
        return np.array([0, *lengths, lengths[-1] + tail]), np.array([0, *log, log[-1] - 8])


class AdmissionForecast:
    """Weigh the steps that an admission saves against the tokens that a preemption costs.

    In a cache of T tokens, a request preempted with x tokens half way through its m steps has saved
    x / 2T of each of m / 2 steps. So it may start if blocks run out with a probability below m / 4T
    * `step_cost_tokens`. After Gong et al. 2025, "Past-Future Scheduler".
    """

    def __init__(self, kv_cache: SchedulerCache, longest: int) -> None:
        self.step_cost_tokens, self._lengths = _STEP_COST, OutputLengths()
        self.learn = self._lengths.learn
        self._kv_cache, self._room = kv_cache, kv_cache.num_pages - 1
        self._tokens = self._room * kv_cache.block_size / kv_cache.block_pages
        self._times: Floats = np.unique(np.floor(np.geomspace(8, longest + 8, 40))) - 8  # steps ahead
        self._weights: Floats = np.convolve(np.diff(self._times), [0.5, 0.5])  # of the trapezoid rule
        self._survival: dict[str, tuple[Floats, Floats]] = {}  # by batch
        self._curves: dict[int, Floats] = {}  # by running request: expected pages, and their variance
        self._total: Floats = np.zeros((2, len(self._times)))
        self._shared = 0  # pages shared by several requests
        self._refresh_at, self._retry_at, self._next_at = 0.0, 0.0, 0.0  # steps

    def has_room(
        self, request: RequestState, prefix: Prefix, step: int, running: Sequence[RequestState], returning: int
    ) -> bool:
        if step < min(self._retry_at, self._refresh_at):
            return False
        request.shared = self._kv_cache.shared_pages(prefix)
        (alive,), curves = self._forecast([request])
        mean, square = float(alive @ self._weights), float(2 * alive * self._times @ self._weights)
        risk = max(1e-6, mean / 4 * self.step_cost_tokens / self._tokens)
        if risk >= 1:
            return True
        if step >= self._refresh_at:
            self._recompute(step, running, returning)
        expected, variance = self._total + curves[:, 0]
        use = expected + NormalDist().inv_cdf(1 - risk) * np.sqrt(np.maximum(variance, 0.0))
        peak = float(use.max()) + self._shared + self._kv_cache.count_free(prefix)
        if peak > self._room or (peak > _UNPACED * self._room and step < self._next_at):
            self._retry_at = self._refresh_at if peak > self._room else self._next_at
            return False
        # Equal requests that start together would reach their longest together, so their starts are
        # spread.
        share = max(0.0, 1 - (square / mean**2 - 1) / _VARIED) / self._room
        self._next_at = max(self._next_at, step - 1) + share * float(curves[0, 0] @ self._weights)
        return True

    def enter(self, request: RequestState, step: int, revived: int) -> None:
        curve = self._curves[request.id] = self._forecast([request])[1][:, 0]
        self._total, self._shared = self._total + curve, self._shared + revived

    def leave(self, request: RequestState) -> None:
        self._total = self._total - self._curves.pop(request.id)
        self._retry_at = min(self._retry_at, self._next_at)

    def _recompute(self, step: int, running: Sequence[RequestState], returning: int) -> None:
        self._refresh_at, self._survival = step + _REFRESH_STEPS, {}
        for request in running:
            request.shared = self._kv_cache.count_shared(request)
        curves = self._forecast(running)[1]
        self._total, self._curves = curves.sum(axis=1), {each.id: curves[:, i] for i, each in enumerate(running)}
        owned = sum(request.pages_held - request.shared for request in running)
        self._shared = self._room - self._kv_cache.pool.num_free - returning - owned

    def _forecast(self, requests: Sequence[RequestState]) -> tuple[Floats, Floats]:
        """Return, by time ahead, the probability that each request runs, and the mean and variance
        of its pages.
        """
        counts = [(request.known, request.limit, request.prompt_length, request.shared) for request in requests]
        known, limit, prompt, shared = np.array(counts, dtype=np.float64).T[..., None]
        alive: Floats = (known + self._times <= limit).astype(np.float64)
        for batch_id in {request.batch_id for request in requests if request.batch_id is not None}:
            rows = [request.batch_id == batch_id for request in requests]
            now = (known - prompt)[rows]
            if batch_id not in self._survival:
                self._survival[batch_id] = self._lengths.log_survival(batch_id, now[:, 0].tolist())
            table = self._survival[batch_id]
            alive[rows] *= np.exp(np.interp(now + self._times, *table) - np.interp(now, *table))
        most = self._kv_cache.pages_at(np.minimum(known + self._times, limit)) - shared
        return alive, np.stack([alive * most, alive * (1 - alive) * most**2])
