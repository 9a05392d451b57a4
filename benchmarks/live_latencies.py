"""Times to the first token and gaps of live calls, as figures of a report."""

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.live_load import MeasuredCall


def latencies(calls: Sequence[MeasuredCall]) -> dict[str, Any]:
    """Return times to the first token and gaps of some calls, in milliseconds."""
    first = [1e3 * call.first_token_seconds for call in calls]
    gaps = [1e3 * gap for call in calls for gap in call.gaps]
    return {
        "calls": len(calls),
        "first_token_p50_ms": round(statistics.median(first), 1),
        "first_token_p99_ms": round(percentile(first, 0.99), 1),
        "gap_p50_ms": round(statistics.median(gaps), 1),
        "gap_p99_ms": round(percentile(gaps, 0.99), 1),
        "longest_gap_ms": round(max(gaps), 1),
    }


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value at a share of the sorted values, without interpolation."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
