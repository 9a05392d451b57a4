"""The picture of live calls beside a batch: latency of each call above, tokens a second below, over
the same time.

An SVG of a few shapes, for light and dark pages. `python -m benchmarks.pages` writes it.
"""

import math
from html import escape
from typing import Any

_WIDTH, _HEIGHT = 860, 500
_LEFT, _RIGHT = 64, 850  # of both panels
_LATENCY, _THROUGHPUT = (58, 270), (318, 462)  # top and bottom of each
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#24292f}.small{font-size:12px;fill:#57606a}"
    ".phase{fill:#818b98;fill-opacity:.13}.axis{stroke:#818b98;stroke-opacity:.35}"
    ".first{fill:#1f6feb}.gap{fill:none;stroke:#bc4c00;stroke-width:1.6}"
    ".allowed-first{stroke:#1f6feb;stroke-dasharray:5 4}.allowed-gap{stroke:#bc4c00;stroke-dasharray:5 4}"
    ".batch{fill:#2da44e;fill-opacity:.75}.live{fill:#1f6feb;fill-opacity:.75}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.small{fill:#9198a1}.first,.live{fill:#58a6ff}"
    ".gap{stroke:#f0883e}.allowed-first{stroke:#58a6ff}.allowed-gap{stroke:#f0883e}.batch{fill:#3fb950}}"
)


def live_plot(figures: dict[str, Any]) -> str:
    """Return the SVG from the part `beside` of the figures of `live`."""
    timeline = figures["timeline"]
    seconds = timeline["phases"][-1][2]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}"'
        f' height="{_HEIGHT}" role="img">',
        "<title>Live calls beside a batch of 900-token prompts</title>",
        f"<style>{_STYLE}</style>",
        *_phases(timeline["phases"], seconds),
        *_latencies(figures, seconds),
        *_throughput(timeline["tokens_per_second"], seconds),
        *_time_axis(seconds),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _phases(phases: list[tuple[str, float, float]], seconds: float) -> list[str]:
    """Return a name above each phase; every other phase is shaded."""
    parts = []
    for number, (name, begin, end) in enumerate(phases):
        left, right = _x(begin, seconds), _x(end, seconds)
        if number % 2:
            for top, bottom in (_LATENCY, _THROUGHPUT):
                parts.append(_rect("phase", left, top, right - left, bottom - top))
        parts.append(_text((left + right) / 2, 18, name, anchor="middle"))
    return parts


def _latencies(figures: dict[str, Any], seconds: float) -> list[str]:
    """Return a filled point for a call's first token and a ring for its longest gap.

    Both are at the time of the call.
    """
    calls = figures["timeline"]["calls"]
    bars = {"first": figures["first_token_allowed_ms"], "gap": figures["gap_allowed_ms"]}
    values = [value for _, first, gap in calls for value in (first, gap) if value > 0]
    lowest, highest = _decades([*values, *bars.values()])
    top, bottom = _LATENCY

    def y(milliseconds: float) -> float:
        share = (math.log10(max(milliseconds, 10**lowest)) - lowest) / (highest - lowest)
        return bottom - share * (bottom - top)

    parts = _legend(_LATENCY[0] - 14, (("first", "first token"), ("gap", "longest gap"), ("allowed", "allowed")))
    for decade in range(lowest, highest + 1):
        parts += _grid(y(10**decade), _duration(10**decade))
    parts += [_line(f"allowed-{look}", _LEFT, _RIGHT, y(allowed)) for look, allowed in bars.items()]
    for sent, first, gap in calls:
        parts.append(f'<circle class="gap" cx="{_x(sent, seconds):.1f}" cy="{y(gap):.1f}" r="3.2"/>')
        parts.append(f'<circle class="first" cx="{_x(sent, seconds):.1f}" cy="{y(first):.1f}" r="3"/>')
    return parts


def _throughput(spans: list[tuple[float, float, float, float]], seconds: float) -> list[str]:
    """Return the batch's tokens with live tokens on top; the width of a span is its duration."""
    top, bottom = _THROUGHPUT
    step = _round_step(max((batch + live for _, _, batch, live in spans), default=1.0))
    most = step * math.ceil(max(batch + live for _, _, batch, live in spans) / step)
    scale = (bottom - top) / most
    parts = _legend(_THROUGHPUT[0] - 14, (("batch", "tokens/s of the batch"), ("live", "of live calls")))
    for begin, end, batch, live in spans:
        left, width = _x(begin, seconds), _x(end, seconds) - _x(begin, seconds)
        parts.append(_rect("batch", left, bottom - batch * scale, width, batch * scale))
        parts.append(_rect("live", left, bottom - (batch + live) * scale, width, live * scale))
    for number in range(round(most / step) + 1):
        parts += _grid(bottom - number * step * scale, f"{number * step:,.0f}")
    return parts


def _legend(y: float, entries: tuple[tuple[str, str], ...]) -> list[str]:
    parts, x = [], float(_LEFT)
    for look, text in entries:
        if look == "allowed":
            parts += [_line("allowed-first", x, x + 18, y - 6), _line("allowed-gap", x, x + 18, y - 2)]
            x += 10
        elif look in ("first", "gap"):
            parts.append(f'<circle class="{look}" cx="{x + 5}" cy="{y - 4}" r="3.2"/>')
        else:
            parts.append(_rect(look, x, y - 10, 11, 11))
        parts.append(_text(x + 16, y, text, "small"))
        x += 30 + 7 * len(text)
    return parts


def _grid(y: float, label: str) -> list[str]:
    return [
        _line("axis", _LEFT, _RIGHT, y),
        _text(_LEFT - 8, y + 4, label, "small", anchor="end"),
    ]


def _time_axis(seconds: float) -> list[str]:
    step = 30 if seconds > 90 else 10
    times = range(0, int(seconds - step / 4), step)
    return [_text(_x(time, seconds), _HEIGHT - 18, f"{time} s", "small", anchor="middle") for time in times]


def _decades(values: list[float]) -> tuple[int, int]:
    """Return the powers of ten below and above all values."""
    return math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))


def _duration(milliseconds: float) -> str:
    return f"{milliseconds / 1e3:g} s" if milliseconds >= 1e3 else f"{milliseconds:g} ms"


def _round_step(most: float) -> float:
    """Return 1, 2 or 5 times a power of ten, so that at most five steps reach the top."""
    power = 10 ** math.floor(math.log10(max(most, 1.0)))
    return next(step for step in (power / 5, power / 2, power, 2 * power) if most <= 5 * step)


def _x(time: float, seconds: float) -> float:
    return _LEFT + (_RIGHT - _LEFT) * time / seconds


def _line(look: str, left: float, right: float, y: float) -> str:
    return f'<line class="{look}" x1="{left:.1f}" x2="{right:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'


def _rect(look: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="{look}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'


def _text(x: float, y: float, text: str, look: str = "", anchor: str = "start") -> str:
    style = f' class="{look}"' if look else ""
    return f'<text{style} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text, quote=False)}</text>'
