"""Writes what pages quote of the files of results: `python -m benchmarks.pages`.

Between its marks, the README gets the table of goals, and `docs/performance.md` the tables of a
step's parts, of batch sizes, of admission, of live calls and of the control plane; the plots are
drawn anew. A test holds that what is committed is what the committed results give.
"""

from pathlib import Path

from benchmarks.admission import admission_table
from benchmarks.control_table import SCENARIOS, control_table
from benchmarks.goals import figures_of, table
from benchmarks.live_plot import live_plot
from benchmarks.live_table import live_table, streams_table
from benchmarks.plot import plot
from benchmarks.profile_table import profile_table, sizes_table
from benchmarks.report import RESULTS, arguments

ROOT = Path(__file__).parent.parent
PLOT, LIVE_PLOT = Path("benchmarks/versus_vllm.svg"), Path("benchmarks/live.svg")
NOT_MEASURED = "Not measured yet.\n"
README, PERFORMANCE = Path("README.md"), Path("docs/performance.md")


def main() -> None:
    arguments(__doc__).parse_args()
    write()


def write() -> None:
    for path, text in pages().items():
        (ROOT / path).write_text(text)


def pages(results: Path = RESULTS) -> dict[Path, str]:
    """Return each page's whole text as these results make it."""
    performance = (ROOT / PERFORMANCE).read_text()
    tables = {"step-profile-gpt2-124m": profile_table, "batch-sizes": sizes_table, "admission": admission_table}
    for name, make in tables.items():
        figures = figures_of(name, results)
        performance = between_marks(performance, name, make(figures) if figures else NOT_MEASURED)
    control = {scenario: figures_of(f"control-plane-{scenario}", results) for scenario in SCENARIOS}
    performance = between_marks(performance, "control-plane", control_table(control))
    live, against = (figures_of(f"live-gpt2-124m{name}", results) for name in ("", "-vllm"))
    performance = between_marks(performance, "live", live_table(live["beside"]) if live else NOT_MEASURED)
    streams = streams_table(live and live["streams"], against) if live or against else NOT_MEASURED
    performance = between_marks(performance, "live-streams", streams)
    readme = between_marks((ROOT / README).read_text(), "goals", table(results))
    plots = {PLOT: plot(results)} | ({LIVE_PLOT: live_plot(live["beside"])} if live else {})
    return {**plots, README: readme, PERFORMANCE: performance}


def between_marks(page: str, name: str, text: str) -> str:
    """Return the page with the text between the marks of that name replaced.

    Raises ValueError where it has none.
    """
    begin, end = f"<!-- {name}: written by benchmarks/pages.py -->\n", f"<!-- end of {name} -->\n"
    before, _, rest = page.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"the page has no marks for {name}")
    return f"{before}{begin}\n{text}\n{end}{after}"


if __name__ == "__main__":
    main()
