"""What the queue and the control plane do, as the table of `docs/performance.md`."""

from collections.abc import Callable

from benchmarks.measured import Figures


def control_table(*figures: Figures | None) -> str:
    """From the figures of `control_plane`, one for each of FILES; what was not measured is left
    out.
    """
    found = zip(_ROWS.items(), figures, strict=True)
    rows = [f"| {name} | {text(one)} |" for (name, (_, text)), one in found if one]
    return "\n".join(["| work | figures |", "| --- | --- |", *rows]) + "\n"


def _throughput(figures: Figures) -> str:
    return f"{figures['lines_per_second']:,} lines/s; Redis' peak {figures['redis_peak_mb']} MB"


def _batches(figures: Figures) -> str:
    commands = round(figures["redis_commands"] / figures["batches"])
    return f"{figures['seconds']} s to the end of the last; {commands} commands of Redis a batch"


def _waits(figures: Figures) -> str:
    def longest(tenant: str) -> float:
        return float(max(figures[f"{tenant}_tenant_{turn}"]["first_claim"] for turn in (1, 2)))

    return f"claimed after {longest('same')} s at most, those of another tenant after {longest('other')} s"


_ROWS: dict[str, tuple[str, Callable[[Figures], str]]] = {
    "a batch of 50,000 lines through the API": ("lines", _throughput),
    "1,000 batches of 10 lines": ("batches", _batches),
    "10 lines behind 8 batches of 150,000 that run": ("behind", _waits),
    "a file of 300,000 lines by `run-batch`": ("file", _throughput),
}
FILES = tuple(f"control-plane-{scenario}" for scenario, _ in _ROWS.values())
