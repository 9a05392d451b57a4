"""The tables of `docs/scaling.md` on the load of a fleet on Redis."""

from typing import Any

from benchmarks.measured import Figures

FILES = ("redis-time", "fleet")
KEPT_PACE = 0.8
"""Least share of the expected throughput at which workers count as keeping their pace."""


def fleet_table(times: Figures | None, fleet: Figures | None) -> str:
    """Return the tables of the figures of `redis_time` and `fleet`, without missing ones."""
    parts = [_times(times)] if times else []
    return "\n".join(parts + ([_fleet(fleet)] if fleet else []))


def keeps_pace(point: dict[str, Any]) -> bool:
    """Return whether the workers of a point kept their pace."""
    return bool(point["lines_per_second"] >= KEPT_PACE * point["asked"])


def last_kept(points: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the point with the most workers that kept their pace, else the first point."""
    return [point for point in points if keeps_pace(point)][-1] if keeps_pace(points[0]) else points[0]


def _times(figures: Figures) -> str:
    each = figures["us_per_line"]
    rows = [
        f"| {name} | {' | '.join(f'{one[name]:.1f}' for one in each.values())} |" for name in next(iter(each.values()))
    ]
    head = f"| µs of Redis per line, {figures['server']} | {' | '.join(each)} |"
    return "\n".join([head, "| --- |" + " --- |" * len(each), *rows]) + "\n"


def _fleet(figures: Figures) -> str:
    head = "| output tokens of a line | workers at their pace | lines/s | µs of Redis per line | of its core"
    rows = [head + " | limit: lines/s | output tokens/s | GPUs |", "| --- | --- | --- | --- | --- | --- | --- | --- |"]
    for tokens, points in figures["curves"].items():
        point = last_kept(points)
        limit = point["limit_lines_per_second"]
        rows.append(
            f"| {tokens} | {point['workers']} | {point['lines_per_second']:,} | {point['redis_us_per_line']}"
            f" | {point['redis_core']:.0%} | {limit:,} | {limit * int(tokens) / 1e6:.1f} million"
            f" | {point['limit_gpus']} |"
        )
    return "\n".join(rows) + "\n"
