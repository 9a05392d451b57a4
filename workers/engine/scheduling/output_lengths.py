"""How long outputs get, learned for each batch from its own requests while it runs."""

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from workers.engine.messages.core import Finish
from workers.engine.scheduling.request import Request

Floats = NDArray[np.float64]

# The buckets that lengths are counted in begin at so many output tokens: four by four, then eight
# in each octave.
EDGES: Floats = np.unique(np.concatenate([np.arange(0, 32, 4), np.floor(32 * 2 ** (np.arange(121) / 8))])).astype(
    np.float64
)

_BUCKETS = len(EDGES) - 1
_GUESS = 256  # tokens, before anything is known
# Requests that what all batches together tell counts for within one, and the guess within all
_WEIGHT = 2.0
_RECENT = 1024  # requests after which older ones count half
_GUESSED: Floats = 1 - np.exp(-np.diff(EDGES) / _GUESS)
_BATCHES = 64  # known at once, else the oldest is forgotten
_SURE = 0.999  # as likely as anything may be, so that whoever outlives it is not lost to reckoning


class OutputLengths:
    """Life tables of outputs: by batch, what part of them is longer than so many tokens.

    The actuarial estimator: of those that reached a bucket, some ended in it by themselves; those
    that were cut off in it by their limit, and those that are still there, count half. So what runs
    tells as much as what has ended, and the first to end, which are short, do not pass for all.
    """

    def __init__(self) -> None:
        self._all = _Counts()
        self._batches: dict[str, _Counts] = {}

    def learn(self, request: Request) -> None:
        """A request has ended, or was aborted: that is what a stop string looks like from here."""
        output = len(request.tokens) - request.prompt_length
        if output <= 0 or request.batch_id is None or request.finish is Finish.ERROR:
            return
        counts = self._batches[request.batch_id] = self._batches.pop(request.batch_id, _Counts())
        if len(self._batches) > _BATCHES:
            del self._batches[next(iter(self._batches))]
        bucket, cut = _bucket(output), request.finish is Finish.LENGTH
        counts.add(bucket, cut=cut)
        self._all.add(bucket, cut=cut)

    def log_survival(self, batch_id: str, running: Sequence[int]) -> Floats:
        """At each of `EDGES` the logarithm of the part that is longer; `running`: how many tokens
        the batch's running requests have.
        """
        expected = self._all.hazard(_GUESSED, ())
        counts = self._batches.get(batch_id) or _Counts()
        return np.concatenate([[0.0], np.cumsum(np.log1p(-counts.hazard(expected, running)))])


class _Counts:
    """By bucket, how many outputs ended there by themselves, and how many were cut."""

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
        """By bucket, the part of those that reach it which ends in it, as far as is known;
        `expected` where nothing is.
        """
        stopped, cut = np.array(self._stopped), np.array(self._cut)
        if running:
            cut += np.bincount([_bucket(output) for output in running], minlength=_BUCKETS)
        reached = np.cumsum((stopped + cut)[::-1])[::-1]
        hazard: Floats = _SURE * (stopped + _WEIGHT * expected) / (reached - cut / 2 + _WEIGHT)
        return hazard


def _bucket(output: int) -> int:
    return min(bisect_right(_EDGES, output) - 1, _BUCKETS - 1)


_EDGES = EDGES.tolist()
