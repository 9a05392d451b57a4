"""Deadlines: which batches may miss the end of their completion windows, by what is left of them
and by how fast their tenants' lines finish.

Such a batch is `urgent` and goes before the others of its tenant, the earliest end first. One that
even all of its tenant's rate cannot finish in time is `late`. It keeps its ordinary place, since
moved up it would only make others late too.
"""

import logging
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping

from jobs.queue.batch_fields import BatchStatus
from jobs.queue.request_queue import Queue

JUDGE_SECONDS = 5.0
"""Between judgements."""
RATE_SECONDS = 60.0
"""Over which rates are measured. A longer time in which nothing finished counts as an outage, which
says nothing of the rate.
"""

_LEAST_RATE_SECONDS = 2 * JUDGE_SECONDS  # a shorter time gives no rate
# A batch becomes urgent when it needs half of the time that is left, with all of its tenant's rate,
# and is so until it needs a quarter, or clearly too much
_URGENT_SHARE, _SAFE_SHARE, _LOST_SHARE = 0.5, 0.25, 1.25
_SAVED_SHARE = 0.8  # a late batch needs less than this before it counts as one that can be saved
_FEW_LINES, _GUESSED_OUTPUT = 16, 256  # as in `cost_of_a_line` of claim.lua

logger = logging.getLogger(__name__)

_Ring = tuple[str, str]  # tenant and model, of batches that wait for the same turns


class _BatchRate:
    """How fast the lines of a batch finish while some of its tenant's do."""

    def __init__(self, now: float, tokens: int) -> None:
        self.since, self.tokens = now, tokens  # of the last measurement
        self._spans: deque[tuple[float, int]] = deque()  # seconds, and the tokens that finished in them

    def add(self, now: float, tokens: int) -> None:
        """Measure from the last time on, at most as far back as the rate goes."""
        if now - self.since <= RATE_SECONDS:
            self._spans.append((now - self.since, tokens - self.tokens))
        self.since, self.tokens = now, tokens
        while self._spans and self._seconds - self._spans[0][0] >= RATE_SECONDS:
            self._spans.popleft()

    @property
    def rate(self) -> float | None:
        """Tokens per second; None until there were enough seconds."""
        seconds = self._seconds
        return sum(tokens for _, tokens in self._spans) / seconds if seconds >= _LEAST_RATE_SECONDS else None

    @property
    def _seconds(self) -> float:
        return sum(seconds for seconds, _ in self._spans)


class Deadlines:
    """The judgements of one ticker. What it measured is lost with it; the risks are in Redis."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._judged_at = -math.inf  # unix seconds
        self._measured: dict[str, _BatchRate] = {}  # by batch

    def judge(self, records: Mapping[str, BatchStatus], now: float) -> None:
        """Note new risks of these batches, every few seconds. Raise what Redis raises."""
        if 0 <= now - self._judged_at < JUDGE_SECONDS:
            return
        self._judged_at = now
        running = {batch: fields for batch, fields in records.items() if fields.state == "in_progress"}
        found = _risks(running, self._measure(running, now), now)
        risks = {batch: risk for batch, risk in found.items() if risk != running[batch].risk}
        for batch, risk in risks.items():
            logger.info("batch %s: %s", batch, _SAID[risk])
        self._queue.note_risks(risks)

    def _measure(self, running: Mapping[str, BatchStatus], now: float) -> dict[str, float]:
        """Return the rates of batches of whose tenant and model lines have just finished."""
        known = {batch: one for batch, one in self._measured.items() if batch in running}
        for batch, fields in running.items():
            one = known.get(batch)
            if one is None or one.since > now or one.tokens > fields.used_tokens:  # Redis or its clock went back
                known[batch] = _BatchRate(now, fields.used_tokens)
        self._measured = known
        moving = {
            ring
            for batch, fields in running.items()
            if fields.used_tokens > known[batch].tokens
            for ring in _rings(fields)
        }
        rates = {}
        for batch, fields in running.items():
            if not moving.isdisjoint(_rings(fields)):
                known[batch].add(now, fields.used_tokens)
                if (rate := known[batch].rate) is not None:
                    rates[batch] = rate
        return rates


_SAID = {
    "": "it is no longer in danger of missing the end of its completion window",
    "urgent": "it may miss the end of its completion window; it goes before the others of its tenant",
    "late": "all of its tenant's rate is too little to finish it within its completion window",
}


def _risks(running: Mapping[str, BatchStatus], rates: Mapping[str, float], now: float) -> dict[str, str]:
    """Return the risk of each batch with a window whose tenant has a rate now.

    A tenant's batches are taken to run one after another, the earliest end first, without those
    that cannot be saved.
    """
    all_rates: dict[_Ring, float] = defaultdict(float)
    for batch, rate in rates.items():
        for ring in _rings(running[batch]):
            all_rates[ring] += rate
    busy: dict[_Ring, float] = defaultdict(float)  # seconds until what comes before is done
    risks = {}
    for batch in sorted(running, key=lambda batch: (running[batch].expires_at, batch)):
        fields, rings = running[batch], _rings(running[batch])
        rate = max((all_rates[ring] for ring in rings), default=0.0)
        left = fields.expires_at - now
        if not rate or math.isinf(left):
            continue
        tokens = _tokens_left(fields)
        needed = max(busy[ring] for ring in rings) + tokens / rate
        own_rate, left = rates.get(batch, 0.0), max(left, 1.0)
        own_share = tokens / own_rate / left if own_rate else math.inf
        risks[batch] = _risk(fields.risk, needed / left, own_share)
        if risks[batch] != "late":
            busy.update(dict.fromkeys(rings, needed))
    return risks


def _risk(before: str, share: float, own_share: float) -> str:
    """`share`: how much of the time that is left the batch needs with all of its tenant's rate;
    `own_share`: how much at its present rate.
    """
    if before == "urgent":
        return "" if share < _SAFE_SHARE else "late" if share > _LOST_SHARE else "urgent"
    enough = _SAVED_SHARE if before == "late" else 1.0
    if share < _URGENT_SHARE or own_share <= enough:
        return ""
    return "late" if share > enough else "urgent"


def _rings(fields: BatchStatus) -> Iterable[_Ring]:
    return [(fields.tenant, model) for model in fields.line_models]


def _tokens_left(fields: BatchStatus) -> float:
    if fields.used_lines >= _FEW_LINES:
        cost = fields.used_tokens / fields.used_lines
    else:
        cost = fields.queued_tokens / max(1, fields.total) + _GUESSED_OUTPUT
    return (fields.total - fields.finished) * cost
