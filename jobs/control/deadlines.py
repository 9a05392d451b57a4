"""Deadlines: find batches that may miss the end of their completion windows.

The estimate uses a batch's remaining lines and the rate at which its tenant's lines finish. Such a
batch is `urgent` and goes before the others of its tenant, the earliest end first. A batch that
cannot finish in time even with all of its tenant's rate is `late`. It keeps its ordinary place,
since moving it up would make others late, too; it is urgent again once it can finish in time.
"""

import logging
import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence, Set
from itertools import islice

from jobs.queue.batch_fields import LATE, URGENT, BatchStatus, Risk
from jobs.queue.request_queue import Queue

JUDGE_SECONDS = 5.0
"""Between judgements."""
RATE_SECONDS = 60.0
"""Period over which rates are measured; longer if lines finish less often.

A longer period in which no line finished counts only if a worker was ready.
"""
LOST_JUDGEMENTS = 36
"""Judgements in a row before an urgent batch is late: the rate may be low for a short time only."""

_LEAST_RATE_SECONDS = 2 * JUDGE_SECONDS  # a shorter period gives no rate
_KEPT_SECONDS = 3600.0  # how long rates are kept after the tenant's last batch
# A batch becomes urgent when it needs half of the remaining time, with all of its tenant's rate. It
# stays urgent until it needs a quarter, or clearly too much.
_URGENT_SHARE, _SAFE_SHARE, _LOST_SHARE = 0.5, 0.25, 1.25
_SAVED_SHARE = 0.9  # a late batch that needs less than this can finish in time again
_FEW_LINES, _GUESSED_OUTPUT = 16, 256  # as in `cost_of_a_line` of claim.lua

logger = logging.getLogger(__name__)

_Group = tuple[str, frozenset[str]]  # tenant and models of batches that share a rate


class Deadlines:
    """The judgements of one ticker. Its measurements are lost with it; the risks are in Redis."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._judged_at = -math.inf  # unix seconds
        self._estimate = RiskEstimate()

    def judge(self, records: Mapping[str, BatchStatus], now: float) -> dict[str, Risk]:
        """Update the risks of these batches, every few seconds, and return those that changed.

        Raise what redis-py raises.
        """
        if 0 <= now - self._judged_at < JUDGE_SECONDS:
            return {}
        self._judged_at = now
        served = {model for worker in self._queue.workers() if worker.state == "ready" for model in worker.models}
        risks = self._estimate.judge(records, served, now)
        changed = {batch: risk for batch, risk in risks.items() if risk != records[batch].risk}
        self._queue.note_risks(changed)
        for batch, risk in changed.items():
            logger.info("batch %s: %s", batch, _SAID[risk])
        return changed


_SAID: dict[Risk, str] = {
    "": "it is no longer at risk of missing the end of its completion window",
    URGENT: "it may miss the end of its completion window; it now goes before its tenant's other batches",
    LATE: "it cannot finish within its completion window, even with all of its tenant's rate",
}


class RiskEstimate:
    """The state between judgements: the rates of tenants, and batches that appear to be late."""

    def __init__(self) -> None:
        self._judged_at = -math.inf  # unix seconds
        self._rates: dict[_Group, _Rate] = {}
        self._lost: dict[str, int] = {}  # batch -> judgements in a row

    def judge(self, records: Mapping[str, BatchStatus], served: Set[str], now: float) -> dict[str, Risk]:
        """Return the risks of batches in progress. Workers are ready for the models `served`."""
        running = {batch: fields for batch, fields in records.items() if fields.state == "in_progress"}
        counts: dict[_Group, dict[str, int]] = defaultdict(dict)
        for batch, fields in running.items():
            counts[_group(fields)][batch] = fields.used_tokens
        for group, tokens in counts.items():
            is_served = not served.isdisjoint(group[1])
            self._rates.setdefault(group, _Rate()).add(now, tokens, self._judged_at, is_served)
        self._rates = {group: rate for group, rate in self._rates.items() if now - rate.read_at <= _KEPT_SECONDS}
        self._judged_at = now
        return self._risks(running, now)

    def _risks(self, running: Mapping[str, BatchStatus], now: float) -> dict[str, Risk]:
        """Return the risks, assuming a tenant's batches run in turn, the earliest end first.

        Batches that cannot finish in time are left out of that order.
        """
        rates: dict[str, dict[frozenset[str], float]] = defaultdict(dict)  # by tenant and models
        for (tenant, models), measured in self._rates.items():
            rates[tenant][models] = measured.of_all()
        before: dict[_Group, float] = defaultdict(float)  # tokens of batches with an earlier end
        risks: dict[str, Risk] = {}
        lost, self._lost = self._lost, {}
        for batch in sorted(running, key=lambda batch: (running[batch].expires_at, batch)):
            fields = running[batch]
            group = tenant, models = _group(fields)
            risks[batch], rate = fields.risk, rates[tenant][models]
            if not rate or math.isinf(fields.expires_at):
                continue
            # The share of these models in the lines of batches on several models is unknown.
            most = rate + sum(rates[tenant][other] for other in rates[tenant] if other != models and other & models)
            left, tokens = max(fields.expires_at - now, 1.0), _tokens_left(fields)
            share, least_share = ((before[group] + tokens) / rate / left for rate in (rate, most))
            own_rate = self._rates[group].of(batch)
            own_share = tokens / own_rate / left if own_rate else math.inf
            self._lost[batch] = lost.get(batch, 0) + 1 if least_share > _LOST_SHARE else 0
            risks[batch] = _risk(fields.risk, share, least_share, own_share, self._lost[batch] >= LOST_JUDGEMENTS)
            if risks[batch] != LATE:
                before[group] += tokens
        return risks


def _risk(before: Risk, share: float, least_share: float, own_share: float, is_lost: bool) -> Risk:
    """Return the risk of a batch by the shares of the remaining time that it needs.

    `share` is for all of its tenant's rate for its models, `least_share` also counts batches that
    share a model, `own_share` is for its own rate.
    """
    if before == URGENT:
        return "" if share < _SAFE_SHARE else LATE if is_lost else URGENT
    enough = _SAVED_SHARE if before == LATE else 1.0
    if share < _URGENT_SHARE or own_share <= enough:
        return ""
    return LATE if least_share > enough else URGENT


class _Rate:
    """The rate at which the lines of a tenant's batches on the same models finish.

    It outlives the batches.
    """

    def __init__(self) -> None:
        self.read_at = self._since = -math.inf  # unix seconds; no line has finished since `_since`
        self._counts: Mapping[str, int] = {}  # tokens by batch at the last reading
        self._spans: deque[tuple[float, dict[str, int]]] = deque()  # seconds, and the tokens that finished in them

    def add(self, now: float, counts: Mapping[str, int], judged_at: float, is_served: bool) -> None:
        """Measure the tokens finished since the last judgement.

        A period without judgements, or without a batch in progress, does not count.
        """
        gained = {batch: tokens - self._counts.get(batch, tokens) for batch, tokens in counts.items()}
        if now < self.read_at or min(gained.values()) < 0:  # Redis lost data, or its clock was set back
            self._spans.clear()
            self._since = now
        elif self.read_at < judged_at or now - judged_at > RATE_SECONDS:
            self._since = now
        elif any(gained.values()):
            if is_served or now - self._since <= RATE_SECONDS:
                self._spans.append((now - self._since, gained))
            self._since = now
        self.read_at, self._counts = now, counts
        while sum(seconds for seconds, _ in islice(self._spans, 1, None)) >= RATE_SECONDS:
            self._spans.popleft()

    def of_all(self) -> float:
        """Return tokens per second; 0 until the measured time is long enough."""
        return _per_second([(seconds, sum(tokens.values())) for seconds, tokens in self._spans])

    def of(self, batch: str) -> float:
        """Return tokens per second of one batch."""
        return _per_second([(seconds, tokens[batch]) for seconds, tokens in self._spans if batch in tokens])


def _per_second(spans: Sequence[tuple[float, int]]) -> float:
    seconds = sum(seconds for seconds, _ in spans)
    return sum(tokens for _, tokens in spans) / seconds if seconds >= _LEAST_RATE_SECONDS else 0.0


def _group(fields: BatchStatus) -> _Group:
    return fields.tenant, frozenset(fields.line_models)


def _tokens_left(fields: BatchStatus) -> float:
    if fields.used_lines >= _FEW_LINES:
        cost = fields.used_tokens / fields.used_lines
    else:
        cost = fields.queued_tokens / max(1, fields.total) + _GUESSED_OUTPUT
    return (fields.total - fields.finished) * cost
