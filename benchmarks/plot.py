"""The plot of `docs/performance.md` from the files of results: how many times as fast as vLLM's CPU
build, one bar for each comparison, processor by processor.

An SVG of a few shapes, for light and dark pages. `python -m benchmarks.pages` writes it.
"""

from html import escape
from pathlib import Path

from benchmarks.goals import AGAINST_VLLM, Goal
from benchmarks.measured import BenchmarkResult, MeasuredProcessor, measured_processors
from benchmarks.report import RESULTS

_WIDTH, _ROW, _TOP = 860, 34, 34
_LEFT, _RIGHT = 390, 210  # of the bars: titles to their left, figures to their right
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#24292f}.small{font-size:12px;fill:#57606a}.name{font-weight:600}"
    ".bar{fill:#1f6feb}.short{fill:#bf8700}"
    ".line{stroke:#57606a;stroke-dasharray:3 3}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.small{fill:#9198a1}.bar{fill:#4493f8}"
    ".short{fill:#d29922}.line{stroke:#9198a1}}"
)


def plot(results: Path = RESULTS) -> str:
    """Return the SVG; comparisons without a file of results are left out."""
    measured = [(one, found) for one in measured_processors(results) if (found := _comparisons(one))]
    values = [goal.value(result.figures) for _, found in measured for goal, result in found]
    scale = (_WIDTH - _LEFT - _RIGHT) / max([2.0, *values])
    height = _TOP + _ROW * (len(measured) + len(values)) + 10
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}"'
            f' height="{height}" role="img">'
        ),
        "<title>How many times as fast as vLLM's CPU build</title>",
        f"<style>{_STYLE}</style>",
        _text(_LEFT + scale, 16, "vLLM's CPU build = 1", "small", anchor="middle"),
    ]
    top = _TOP
    for one, found in measured:
        parts += _bars(one, found, top, scale)
        top += _ROW * (1 + len(found))
    parts += [
        f'<line class="line" x1="{_LEFT + scale:.1f}" x2="{_LEFT + scale:.1f}" y1="22" y2="{height - 8}"/>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _comparisons(one: MeasuredProcessor) -> list[tuple[Goal, BenchmarkResult]]:
    return [(goal, result) for goal in AGAINST_VLLM if (result := one.result(goal.file))]


def _bars(one: MeasuredProcessor, found: list[tuple[Goal, BenchmarkResult]], top: int, scale: float) -> list[str]:
    """Return the bars of a processor below its name and the date of its last figure."""
    name = f"{one.processor.title}, {max(result.date for _, result in found)}"
    parts = [_text(10, top + _ROW // 2 + 4, name, "name")]
    for number, (goal, result) in enumerate(found, 1):
        middle, value = top + _ROW * number + _ROW // 2, goal.value(result.figures)
        width, target = value * scale, goal.target(one.processor.instructions)
        look = "short" if target and not goal.met(value, target) else "bar"
        label = f"{goal.text(value)}  ({goal.beside(result.figures)})"
        parts += [
            _text(_LEFT - 10, middle + 4, _title(goal.title), anchor="end"),
            f'<rect class="{look}" x="{_LEFT}" y="{middle - 10}" width="{width:.1f}" height="20" rx="2"/>',
            _text(_LEFT + max(width, scale) + 8, middle + 4, label, "small"),
        ]
    return parts


def _title(title: str) -> str:
    plain = title.replace("`", "").replace("the same", "engine")
    for peer in (", whole process, against vllm run-batch", ", against vllm serve", ", against vLLM"):
        plain = plain.removesuffix(peer)
    return plain


def _text(x: float, y: float, text: str, look: str = "", anchor: str = "start") -> str:
    style = f' class="{look}"' if look else ""
    return f'<text{style} x="{x:.1f}" y="{y}" text-anchor="{anchor}">{escape(text, quote=False)}</text>'
