"""Where a step's time goes and how batch sizes fare, as the tables of `docs/performance.md`."""

from typing import Any

PARTS = ("matrix", "attention", "norms and elementwise", "sampling", "inputs", "python")


def profile_table(figures: dict[str, Any]) -> str:
    """From the figures of `step_profile`."""
    decode, prefill, rows = figures["decode"], figures["prefill"], figures["rows"]
    lines = [
        f"| part | decode, {rows} rows at {figures['context']} tokens | bound | prompts, {prefill['tokens']:,} tokens |"
        " bound |"
    ]
    lines.append("| --- | --- | --- | --- | --- |")
    for part in PARTS:
        cells = [cell for kind in (decode, prefill) for cell in _cells(kind["parts"][part])]
        lines.append(f"| {part} | {' | '.join(cells)} |")
    lines.append(f"| whole step, not profiled | {decode['step_ms']:.1f} ms | | {prefill['step_ms']:.1f} ms | |")
    if "queue" in figures:
        lines.append(
            f"| queue, beside the step | {figures['queue']['processor_ms_per_step']:.1f} ms of processor time | | | |"
        )
    return "\n".join(lines) + "\n"


def sizes_table(figures: dict[str, Any]) -> str:
    """From the figures of `batch_sizes`."""
    lines = [
        "| shape | context | rows | step | tok/s | bound | share of it |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for step in figures["steps"]:
        lines.append(
            f"| `{step['model']}` | {step['context']:,} | {step['rows']} | {step['step_ms']:.1f} ms |"
            f" {step['tokens_per_second']:,.0f} | {step['bound_ms']:.1f} ms | {100 * step['share_of_bound']:.0f} % |"
        )
    return "\n".join(lines) + "\n"


def _cells(part: dict[str, float]) -> tuple[str, str]:
    bound = f"{part['bound_ms']:.1f} ms" if "bound_ms" in part else ""
    return f"{part['ms']:.1f} ms ({100 * part['share']:.1f} %)", bound
