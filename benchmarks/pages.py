"""Writes what pages quote of the files of results: `python -m benchmarks.pages`.

Between its marks, the README gets the table of goals, and `docs/performance.md` the tables of a
step's parts, of batch sizes and of the control plane; the plot is drawn anew. A test holds that
what is committed is what the committed results give.
"""

from pathlib import Path

from benchmarks.control_table import SCENARIOS, control_table
from benchmarks.goals import figures_of, table
from benchmarks.plot import plot
from benchmarks.profile_table import profile_table, sizes_table
from benchmarks.report import RESULTS, arguments

ROOT = Path(__file__).parent.parent
PLOT = Path("benchmarks/versus_vllm.svg")
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
    for name, make in (("step-profile-gpt2-124m", profile_table), ("batch-sizes", sizes_table)):
        figures = figures_of(name, results)
        performance = between_marks(performance, name, make(figures) if figures else "Not measured yet.\n")
    control = {scenario: figures_of(f"control-plane-{scenario}", results) for scenario in SCENARIOS}
    performance = between_marks(performance, "control-plane", control_table(control))
    readme = between_marks((ROOT / README).read_text(), "goals", table(results))
    return {PLOT: plot(results), README: readme, PERFORMANCE: performance}


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
