"""The tables of `docs/performance.md` on the parts of a step and on batch sizes."""

from typing import Any

PARTS = ("matrix", "attention", "norms and elementwise", "sampling", "inputs", "python")


def profile_table(figures: dict[str, Any]) -> str:
    """Return the table of the figures of `step_profile`."""
    decode, prefill = figures["decode"], figures["prefill"]
    steps = {
        f"decode, {figures['rows']} rows at {figures['context']} tokens": decode,
        f"prompts, {prefill['tokens']:,} tokens": prefill,
    }
    head = ["ms", *PARTS, "whole step, not profiled", "queue, beside the step"]
    lines = [head, ["---"] * len(head)]
    for title, step in steps.items():
        lines.append([title, *(_part(step["parts"][part]) for part in PARTS), f"{step['step_ms']:.1f}", ""])
    if "queue" in figures:
        lines[2][-1] = f"{figures['queue']['processor_ms_per_step']:.1f}"
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def sizes_table(figures: dict[str, Any]) -> str:
    """Return the table of the figures of `batch_sizes`.

    It has a row for each shape and context, and a column for each number of rows.
    """
    cells: dict[tuple[str, int], dict[int, str]] = {}
    for step in figures["steps"]:
        rate = f"{step['tokens_per_second']:,.0f} ({100 * step['share_of_bound']:.0f} %)"
        cells.setdefault((step["model"], step["context"]), {})[step["rows"]] = rate
    counts = sorted({step["rows"] for step in figures["steps"]})
    head = ["tok/s (of the bound)", *(f"{count} rows" if count > 1 else "1 row" for count in counts)]
    lines = [head, ["---"] * len(head)]
    for (model, context), rates in cells.items():
        lines.append([f"`{model}`, context {context:,}", *(rates.get(count, "") for count in counts)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _part(part: dict[str, float]) -> str:
    bound = f" ({part['bound_ms']:.1f})" if "bound_ms" in part else ""
    return f"{part['ms']:.1f}{bound}"
