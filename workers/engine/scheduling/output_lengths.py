"""Estimate output lengths by batch, from its own requests while it runs."""

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from workers.engine.messages.core import Finish
from workers.engine.scheduling.request import RequestState

Floats = NDArray[np.float64]

# Lower bounds of the length buckets, in output tokens: every 4, then 8 in each octave.
EDGES: Floats = np.unique(np.concatenate([np.arange(0, 32, 4), np.floor(32 * 2 ** (np.arange(121) / 8))])).astype(
    np.float64
)

_BUCKETS = len(EDGES) - 1
_GUESS = 256  # tokens, before anything is known
# Pseudo-requests: the weight of all batches' hazard within one, and of the guess within all
_WEIGHT = 2.0
_RECENT = 1024  # requests after which older ones count half
_GUESSED: Floats = 1 - np.exp(-np.diff(EDGES) / _GUESS)
_BATCHES = 64  # known at once; beyond that the oldest is dropped
_MAX_HAZARD = 0.999  # the largest hazard, so that a survival probability is never 0


class OutputLengths:
    """Survival estimates of output lengths by batch: the share longer than a number of tokens.

    This is the actuarial estimator. Of the outputs that reached a bucket, some ended in it by
    themselves; those cut off in it by their limit, and those still running in it, count half. So
    running requests count as evidence too, and the first outputs to end, which are short, do not
    bias the estimate.
    """

    def __init__(self) -> None:
        self._all = _Counts()
        self._batches: dict[str, _Counts] = {}

    def learn(self, request: RequestState) -> None:
        """Count the output of a request that ended or was aborted.

        The worker process aborts a request at a stop string, so both are natural ends.
        """
        output = len(request.tokens) - request.prompt_length
        if output <= 0 or request.batch_id is None or request.finish >= Finish.ERROR:
            return
        counts = self._batches[request.batch_id] = self._batches.pop(request.batch_id, _Counts())
        if len(self._batches) > _BATCHES:
            del self._batches[next(iter(self._batches))]
        bucket, cut = _bucket(output), request.finish is Finish.LENGTH
        counts.add(bucket, cut=cut)
        self._all.add(bucket, cut=cut)

    def log_survival(self, batch_id: str, running: Sequence[int]) -> Floats:
        """Return the logarithm of the share of outputs longer than each of `EDGES`.

        `running`: output tokens so far of the batch's running requests.
        """
        expected = self._all.hazard(_GUESSED, ())
        counts = self._batches.get(batch_id) or _Counts()
        return np.concatenate([[0.0], np.cumsum(np.log1p(-counts.hazard(expected, running)))])


class _Counts:
    """Count, by bucket, the outputs that ended there by themselves and those cut by a limit."""

    def __init__(self) -> None:
        self._stopped = [0.0] * _BUCKETS
        self._cut = [0.0] * _BUCKETS
        self._total = 0.0

    def add(self, bucket: int, *, cut: bool) -> None:
        (self._cut if cut else self._stopped)[bucket] += 1
        self._total += 1
        if self._total >= _RECENT:
            self._total /= 2
            self._stopped = [count / 2 for count in self._stopped]
            self._cut = [count / 2 for count in self._cut]

    def hazard(self, expected: Floats, running: Sequence[int]) -> Floats:
        """Return, by bucket, the share of the outputs reaching it that end in it.

        `expected` is the prior, used where nothing is known.
        """
        stopped, cut = np.array(self._stopped), np.array(self._cut)
        if running:
            cut += np.bincount([_bucket(output) for output in running], minlength=_BUCKETS)
        reached = np.cumsum((stopped + cut)[::-1])[::-1]
        hazard: Floats = _MAX_HAZARD * (stopped + _WEIGHT * expected) / (reached - cut / 2 + _WEIGHT)
        return hazard


def _bucket(output: int) -> int:
    return min(bisect_right(_EDGES, output) - 1, _BUCKETS - 1)


_EDGES = EDGES.tolist()
