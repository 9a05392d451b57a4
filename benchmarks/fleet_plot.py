"""The picture of a fleet on one Redis: its share of a core by the number of workers, a curve for
each length of lines.

An SVG of a few shapes, for light and dark pages. `python -m benchmarks.pages` writes it.
"""

import math
from html import escape
from typing import Any

from benchmarks.fleet_table import keeps_pace, last_kept

_WIDTH, _HEIGHT = 860, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 700, 40, 320
_MOST_WORKERS = 1024
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#24292f}.small{font-size:12px;fill:#57606a}"
    ".axis{stroke:#818b98;stroke-opacity:.35}.full{stroke:#cf222e;stroke-dasharray:5 4}"
    ".a{stroke:#1f6feb;fill:#1f6feb}.b{stroke:#2da44e;fill:#2da44e}.c{stroke:#bc4c00;fill:#bc4c00}"
    "polyline.a,polyline.b,polyline.c{fill:none;stroke-width:1.8}.beyond{stroke-dasharray:3 4}.late{fill:none}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.small{fill:#9198a1}.a{stroke:#58a6ff;fill:#58a6ff}"
    ".b{stroke:#3fb950;fill:#3fb950}.c{stroke:#f0883e;fill:#f0883e}}"
)


def fleet_plot(figures: dict[str, Any]) -> str:
    """Return the SVG from the figures of `fleet`."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}"'
        f' height="{_HEIGHT}" role="img">',
        "<title>Share of its core that one Redis uses, by the number of workers</title>",
        f"<style>{_STYLE}</style>",
        *_axes(),
    ]
    for look, (tokens, points) in zip("abc", figures["curves"].items(), strict=False):
        parts += _curve(look, tokens, points)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _axes() -> list[str]:
    parts = [_text(_LEFT, 20, "Redis' share of its core; workers at the pace of an H100, each one GPU")]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        look = "full" if share == 1.0 else "axis"
        parts.append(f'<line class="{look}" x1="{_LEFT}" x2="{_RIGHT}" y1="{_y(share):.1f}" y2="{_y(share):.1f}"/>')
        parts.append(_text(_LEFT - 8, _y(share) + 4, f"{share:.0%}", "small", "end"))
    for power in range(int(math.log2(_MOST_WORKERS)) + 1):
        parts.append(_text(_x(2**power), _BOTTOM + 20, str(2**power), "small", "middle"))
    parts.append(_text((_LEFT + _RIGHT) / 2, _BOTTOM + 44, "workers", "small", "middle"))
    return parts


def _curve(look: str, tokens: str, points: list[dict[str, Any]]) -> list[str]:
    """Return the measured points and a dashed line from the last kept point to the whole core.

    Points are hollow if the workers did not keep their pace.
    """
    kept = [point for point in points if keeps_pace(point)]
    measured = " ".join(f"{_x(point['workers']):.1f},{_y(point['redis_core']):.1f}" for point in kept)
    last = last_kept(points)
    most = min(_MOST_WORKERS, last["workers"] / last["redis_core"])
    counts = [last["workers"] * (most / last["workers"]) ** (step / 20) for step in range(21)]
    share = last["redis_core"] / last["workers"]
    beyond = " ".join(f"{_x(count):.1f},{_y(count * share):.1f}" for count in counts)
    parts = [f'<polyline class="{look}" points="{measured}"/>', f'<polyline class="{look} beyond" points="{beyond}"/>']
    for point in points:
        late = "" if keeps_pace(point) else " late"
        parts.append(
            f'<circle class="{look}{late}" cx="{_x(point["workers"]):.1f}" cy="{_y(point["redis_core"]):.1f}" r="3.2"/>'
        )
    label = f"{tokens} tokens: {last['limit_gpus']} GPUs"
    return [*parts, _text(_x(most) + 8, _y(most * share) + 4, label, "small")]


def _x(workers: float) -> float:
    return _LEFT + (_RIGHT - _LEFT) * math.log2(workers) / math.log2(_MOST_WORKERS)


def _y(share: float) -> float:
    return _BOTTOM - (_BOTTOM - _TOP) * min(share, 1.0)


def _text(x: float, y: float, text: str, look: str = "", anchor: str = "start") -> str:
    style = f' class="{look}"' if look else ""
    return f'<text{style} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text, quote=False)}</text>'
