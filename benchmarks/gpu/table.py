"""The table of a run, as Markdown."""

from typing import Any

from benchmarks.gpu.rows import ROWS, Row

Outcome = dict[str, Any]
"""A row's figures, or `{"failed": why}`."""


def table(outcomes: dict[str, Outcome]) -> str:
    """Return one line per row that ran."""
    lines = ["| | at least | hoped for | measured | bound | of the bound |", "| --- | --- | --- | --- | --- | --- |"]
    lines += [_line(ROWS[name], outcome) for name, outcome in outcomes.items()]
    return "\n".join(lines) + "\n"


def notes(outcomes: dict[str, Outcome]) -> str:
    """Return the method of each figure, or the reason for a missing one."""
    lines = []
    for name, outcome in outcomes.items():
        how = f"not measured: {outcome['failed']}" if "failed" in outcome else outcome["how"]
        lines.append(f"- **{ROWS[name].title}**: {how}.")
    return "\n".join(lines) + "\n"


def _line(row: Row, outcome: Outcome) -> str:
    if "failed" in outcome:
        return f"| {row.title} | {_goal(row, row.at_least)} | {_goal(row, row.hoped)} | failed | | |"
    verdict = {True: "", False: " (short)", None: ""}[row.met(outcome)]
    measured = f"{_number(outcome['value'])} {row.unit}{verdict}" + (
        f", {outcome['also']}" if "also" in outcome else ""
    )
    bound = outcome.get("bound")
    share = f"{100 * outcome['value'] / bound:.1f} %" if bound else ""
    limit = f"{_number(bound)} {row.unit}" if bound else "–"
    return f"| {row.title} | {_goal(row, row.at_least)} | {_goal(row, row.hoped)} | {measured} | {limit} | {share} |"


def _goal(row: Row, goal: float | None) -> str:
    if goal is None:
        return "–"
    if row.of_bound:
        return f"{100 * goal:.0f} % of the bound"
    return f"{'≤ ' if row.less_is_better else ''}{_number(goal)} {row.unit}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"
