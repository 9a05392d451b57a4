"""The table of `docs/performance.md` on the queue and the control plane."""

from collections.abc import Callable

from benchmarks.measured import Figures


def control_table(*figures: Figures | None) -> str:
    """Return the table of the figures of `control_plane`, one for each of FILES.

    Scenarios without figures are left out.
    """
    found = zip(_ROWS.items(), figures, strict=True)
    rows = [f"| {name} | {text(one)} |" for (name, (_, text)), one in found if one]
    return "\n".join(["| work | figures |", "| --- | --- |", *rows]) + "\n"


def _throughput(figures: Figures) -> str:
    return f"{figures['lines_per_second']:,} lines/s; Redis' peak {figures['redis_peak_mb']} MB"


def _memory(figures: Figures) -> str:
    resident = {name: level for name, level in figures["mb"].items() if name.endswith(", resident")}
    peak, (redis, grown) = max(level["peak"] for level in resident.values()), _redis_and_growth(figures)
    return (
        f"{figures['lines_per_second']:,} lines/s; no process above {peak:.0f} MB, none grows by more than"
        f" {grown:.1f} MB from the third fifth to the last; Redis' peak {redis} MB"
    )


def _redis_and_growth(figures: Figures) -> tuple[float, float]:
    followed = [level for name, level in figures["mb"].items() if "last" in level and "third" in level]
    return figures["redis_peak_mb"], max(level["last"] - level["third"] for level in followed)


def _appended(figures: Figures) -> str:
    return f"{figures['appended_lines_per_second']:,} lines/s acknowledged, on disk, while they run"


def _first_claim(figures: Figures) -> str:
    return f"its first line is claimed after {figures['first_claim']} s"


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
    "50,000 lines appended to an open batch, 500 in a call": ("open", _appended),
    "a file of 300,000 lines by `run-batch`": ("file", _throughput),
    "a file of 206 MB, 100,000 lines, by `run-batch`": ("large", _first_claim),
    "a file of 1,000,000 lines by the command `run-batch`": ("million", _memory),
}
FILES = tuple(f"control-plane-{scenario}" for scenario, _ in _ROWS.values())
