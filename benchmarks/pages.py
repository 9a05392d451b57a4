"""Writes the tables and plots of the pages from the files of results: `python -m benchmarks.pages`.

Between its marks, `docs/performance.md` gets the tables of goals, of a step's parts, of batch
sizes, of admission, of live calls and of the control plane; `docs/scaling.md` gets the tables of a
fleet. Each has all measured processors. The plots are drawn again. A test checks that the committed
pages follow from the committed results.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import control_table, fleet_table
from benchmarks.admission import admission_ranges
from benchmarks.fleet_plot import fleet_plot
from benchmarks.goals import table
from benchmarks.live_plot import live_plot
from benchmarks.live_table import live_table, streams_table
from benchmarks.measured import MeasuredProcessor, measured_processors
from benchmarks.plot import plot
from benchmarks.profile_table import profile_table, sizes_table
from benchmarks.report import RESULTS, arguments

ROOT = Path(__file__).parent.parent
PLOT = Path("benchmarks/versus_vllm.svg")
NOT_MEASURED = "Not measured yet.\n"
PERFORMANCE, SCALING = Path("docs/performance.md"), Path("docs/scaling.md")

_LIVE, _FLEET = "live-gpt2-124m", "fleet"
_PICTURES = {
    "live": "Latency of each live call, and tokens a second",
    _FLEET: "Redis' share of its core, by the number of workers",
}
"""Captions of the pictures above tables, by the name of the marks."""
_TABLES: dict[str, tuple[Sequence[str], Callable[..., str]]] = {
    "step-profile-gpt2-124m": (["step-profile-gpt2-124m"], profile_table),
    "batch-sizes": (["batch-sizes"], sizes_table),
    "admission": (["admission"], admission_ranges),
    "live": ([_LIVE], live_table),
    "live-streams": ([f"{_LIVE}-vllm"], streams_table),
    "control-plane": (control_table.FILES, control_table.control_table),
}
"""Tables of `docs/performance.md` by the name of the marks: files of results, and the function that
makes a table of their figures."""


def main() -> None:
    arguments(__doc__).parse_args()
    write()


def write() -> None:
    for path, text in pages().items():
        (ROOT / path).write_text(text)


def pages(results: Path = RESULTS) -> dict[Path, str]:
    """Return each page's whole text, generated from these results."""
    processors = measured_processors(results)
    performance = between_marks((ROOT / PERFORMANCE).read_text(), "goals", table(results))
    for name, (files, make) in _TABLES.items():
        titled = list(filter(None, (_titled_table(one, files, make) for one in processors)))
        pictures = [_shown(one, name) for one in processors if name == "live" and one.result(_LIVE)]
        performance = between_marks(performance, name, "".join(pictures) + side_by_side(titled) or NOT_MEASURED)
    tables = [_of_processor(one, _FLEET, fleet_table.FILES, fleet_table.fleet_table) for one in processors]
    scaling = between_marks((ROOT / SCALING).read_text(), _FLEET, "\n".join(filter(None, tables)) or NOT_MEASURED)
    drawn = {}
    for one in processors:
        if result := one.result(_LIVE):
            drawn[_picture(one, "live")] = live_plot(result.figures["beside"])
        if result := one.result(_FLEET):
            drawn[_picture(one, _FLEET)] = fleet_plot(result.figures)
    return {PLOT: plot(results), **drawn, PERFORMANCE: performance, SCALING: scaling}


def _of_processor(one: MeasuredProcessor, name: str, files: Sequence[str], make: Callable[..., str]) -> str | None:
    """Return the picture and the tables below the processor's name, if it has any."""
    titled = _titled_table(one, files, make)
    return f"{titled[0]}:\n\n{_shown(one, name)}{titled[1]}" if titled else None


def _titled_table(one: MeasuredProcessor, files: Sequence[str], make: Callable[..., str]) -> tuple[str, str] | None:
    """Return the processor's name with the date of its last figure, and its table, if any."""
    results = [one.result(file) for file in files]
    if not any(results):
        return None
    date = max(result.date for result in results if result)
    return f"{one.processor.title}, {date}", make(*(result and result.figures for result in results))


def side_by_side(titled: Sequence[tuple[str, str]]) -> str:
    """Return tables with the same head as one, with the titles in its first column."""
    joined: dict[str, list[str]] = {}
    for title, text in titled:
        head, _, *rows = text.splitlines()
        lines = joined.setdefault(head, [f"| processor {head}", f"| --- {'| --- ' * (head.count('|') - 1)}|"])
        lines += [f"| {title if number == 0 else ''} {row}" for number, row in enumerate(rows)]
    return "\n".join("\n".join(lines) + "\n" for lines in joined.values())


def _shown(one: MeasuredProcessor, name: str) -> str:
    return f"![{_PICTURES[name]}](../{_picture(one, name)})\n\n"


def _picture(one: MeasuredProcessor, name: str) -> Path:
    """Return the path of the plot above a processor's table."""
    return Path(f"benchmarks/{name}-{one.processor.folder}.svg")


def between_marks(page: str, name: str, text: str) -> str:
    """Return the page with the text between the marks of that name replaced.

    Raises ValueError if the page has none.
    """
    begin, end = f"<!-- {name}: written by benchmarks/pages.py -->\n", f"<!-- end of {name} -->\n"
    before, _, rest = page.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"the page has no marks for {name}")
    return f"{before}{begin}\n{text}\n{end}{after}"


if __name__ == "__main__":
    main()
