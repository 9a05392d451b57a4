"""The README's plot from the files of results: how many times as fast as vLLM's CPU build, one bar
for each comparison.

An SVG of a few shapes, for light and dark pages. `python -m benchmarks.pages` writes it.
"""

from html import escape
from pathlib import Path

from benchmarks.goals import AGAINST_VLLM, figures_of
from benchmarks.report import RESULTS

_WIDTH, _ROW, _TOP = 860, 34, 34
_LEFT, _RIGHT = 390, 210  # of the bars: titles to their left, figures to their right
_STYLE = (
    "text{font:13px"
    " system-ui,sans-serif;fill:#24292f}.small{font-size:12px;fill:#57606a}.bar{fill:#1f6feb}.short{fill:#bf8700}"
    ".line{stroke:#57606a;stroke-dasharray:3 3}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.small{fill:#9198a1}.bar{fill:#4493f8}"
    ".short{fill:#d29922}.line{stroke:#9198a1}}"
)


def plot(folder: Path = RESULTS) -> str:
    """Return the SVG; comparisons without a file of results are left out."""
    found = [(goal, figures) for goal in AGAINST_VLLM if (figures := figures_of(goal.file, folder)) is not None]
    longest = max([2.0, *(goal.value(figures) for goal, figures in found)])
    scale = (_WIDTH - _LEFT - _RIGHT) / longest
    height = _TOP + _ROW * len(found) + 10
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}"'
            f' height="{height}" role="img">'
        ),
        "<title>How many times as fast as vLLM's CPU build</title>",
        f"<style>{_STYLE}</style>",
        _text(_LEFT + scale, 16, "vLLM's CPU build = 1", "small", anchor="middle"),
    ]
    for number, (goal, figures) in enumerate(found):
        middle, value = _TOP + _ROW * number + _ROW // 2, goal.value(figures)
        width = value * scale
        look = "bar" if goal.met(value) else "short"
        parts += [
            _text(_LEFT - 10, middle + 4, _title(goal.title), anchor="end"),
            f'<rect class="{look}" x="{_LEFT}" y="{middle - 10}" width="{width:.1f}" height="20" rx="2"/>',
            _text(_LEFT + max(width, scale) + 8, middle + 4, f"{goal.text(value)}  ({goal.beside(figures)})", "small"),
        ]
    parts += [
        f'<line class="line" x1="{_LEFT + scale:.1f}" x2="{_LEFT + scale:.1f}" y1="22" y2="{height - 8}"/>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _title(title: str) -> str:
    plain = title.replace("`", "").replace("the same", "engine")
    for peer in (", whole process, against vllm run-batch", ", against vllm serve", ", against vLLM"):
        plain = plain.removesuffix(peer)
    return plain


def _text(x: float, y: float, text: str, look: str = "", anchor: str = "start") -> str:
    style = f' class="{look}"' if look else ""
    return f'<text{style} x="{x:.1f}" y="{y}" text-anchor="{anchor}">{escape(text, quote=False)}</text>'
