"""The goals of throughput on a CPU, and what the files of results say of each: `python -m
benchmarks.goals` prints the README's table.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, arguments

Figures = dict[str, Any]

_LIVE = "live-gpt2-124m"
_STRUCTURED = "structured-outputs-gpt2-124m-151936"


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure in a file of results, and what it is to reach.

    `less` where a smaller one is better.
    """

    title: str
    file: str
    unit: str  # "x", "%", "s" or "ms"
    at_least: float
    hoped: float
    value: Callable[[Figures], float]
    beside: Callable[[Figures], str]
    less: bool = False

    def met(self, value: float) -> bool:
        return value <= self.at_least if self.less else value >= self.at_least

    def text(self, value: float) -> str:
        """Return a figure in the goal's unit."""
        return {"x": f"{value:.2f}x", "%": f"{100 * value:.1f} %", "s": f"{value:.1f} s", "ms": f"{value:.0f} ms"}[
            self.unit
        ]


def _ratio(figures: Figures) -> float:
    ratio: float = figures["ratio"]
    return ratio


def _rates(figures: Figures) -> str:
    return (
        f"{figures['engine']['output_tokens_per_second']:.0f} against {figures['vllm']['output_tokens_per_second']:.0f}"
        " tok/s"
    )


def _seconds(figures: Figures) -> str:
    return f"{figures['pipeline']['median_seconds']:.1f} against {figures['vllm']['median_seconds']:.1f} s"


def _engine(title: str, model: str, kind: str, requests: int, at_least: float, hoped: float) -> Goal:
    return Goal(title, f"engine-{model}-{kind}-{requests}-vllm", "x", at_least, hoped, _ratio, _rates)


def _run_batch(lines: int, at_least: float, hoped: float) -> Goal:
    title = f"`run-batch`, {lines:,} chat lines, whole process, against `vllm run-batch`"
    return Goal(title, f"run-batch-gpt2-124m-shared-{lines}-vllm", "x", at_least, hoped, _ratio, _seconds)


def _against(figures: Figures, name: str, first: str, second: str) -> str:
    return f"{figures[first][name]:,.0f} against {figures[second][name]:,.0f}"


def _served(figures: Figures) -> str:
    return f"{_against(figures, 'output_tokens_per_second', 'pipeline', 'vllm')} tok/s"


def _all_tokens(figures: Figures) -> str:
    kinds = ("prompt", "output")
    rates = [_against(figures, f"{kind}_tokens_per_second", "live_and_batch", "batch_alone") for kind in kinds]
    return f"prompts {rates[0]} tok/s, answers {rates[1]} tok/s"


def _streams(figures: Figures) -> str:
    rates = [figures[f"{name}output_tokens_per_second"] for name in ("", "engine_")]
    return f"{rates[0]:.0f} against {rates[1]:.0f} tok/s"


def _live(
    title: str,
    part: str,
    name: str,
    at_least: float,
    hoped: float,
    beside: Callable[[Figures], str],
    less: bool = False,
) -> Goal:
    return Goal(
        title,
        _LIVE,
        "x",
        at_least,
        hoped,
        lambda figures: float(figures[part][name]),
        lambda figures: beside(figures[part]),
        less,
    )


def _allowed(title: str, name: str, value: str, hoped: float) -> Goal:
    """A latency beside a batch, as a share of what is allowed."""

    def beside(figures: Figures) -> str:
        return f"{figures['beside'][f'{value}_ms']:,.0f} ms of {figures[f'{name}_allowed_ms']:,.0f} ms"

    return _live(title, "beside", f"{name}_share", 1.0, hoped, beside, less=True)


def _slower(title: str, part: str, at_least: float, hoped: float) -> Goal:
    def beside(figures: Figures) -> str:
        return f"steps of {figures[part]['step_ms']:.1f} against {figures[part]['step_ms_without']:.1f} ms"

    return Goal(
        title, _STRUCTURED, "%", at_least, hoped, lambda figures: float(figures[part]["slower"]), beside, less=True
    )


AGAINST_VLLM = (
    _engine("engine, 64 random prompts, against vLLM", "gpt2-124m", "random", 64, 1.3, 1.5),
    _engine("engine, 256 requests with one system prompt, against vLLM", "gpt2-124m", "shared", 256, 1.4, 1.7),
    _engine("the same, `llama-135m`, 64 random prompts", "llama-135m", "random", 64, 1.0, 1.3),
    _engine("the same, `qwen3-0.6b`, 64 random prompts", "qwen3-0.6b", "random", 64, 1.0, 1.3),
    _run_batch(128, 4.5, 5.5),
    _run_batch(1024, 1.7, 2.0),
    Goal("`pipeline serve`, 64 streams, against `vllm serve`", f"{_LIVE}-vllm", "x", 1.0, 1.3, _ratio, _served),
)
LIVE = (
    _allowed("live calls beside a batch: first token, p99, of what is allowed", "first_token", "first_token_p99", 0.7),
    _allowed("the same, longest gap in a stream", "gap", "longest_gap", 0.8),
    _live(
        "the same, all tokens at their cost, against the batch alone",
        "beside",
        "ratio",
        0.9,
        0.97,
        _all_tokens,
    ),
    _live("64 live streams against the engine alone", "streams", "ratio", 0.95, 1.0, _streams),
    Goal(
        "64 live streams, first token, p99, against `vllm serve`",
        f"{_LIVE}-vllm",
        "x",
        1.0,
        0.7,
        lambda figures: float(figures["first_token_ratio"]),
        lambda figures: f"{_against(figures, 'first_token_p99_ms', 'pipeline', 'vllm')} ms",
        less=True,
    ),
    Goal(
        "`pipeline serve` without a request, all processes, of a core",
        "idle-gpt2-124m",
        "%",
        0.01,
        0.005,
        lambda figures: float(figures["cores"]),
        lambda figures: f"over {figures['seconds']:.0f} s",
        less=True,
    ),
)
GOALS = (
    *AGAINST_VLLM,
    Goal(
        "one request alone, decode, against llama.cpp's 159 tok/s in bf16, measured elsewhere",
        "alone-gpt2-124m",
        "x",
        0.9,
        1.0,
        _ratio,
        lambda figures: f"{figures['tokens_per_second']:.0f} tok/s, {figures['ms_per_token']:.1f} ms per token",
    ),
    Goal(
        "the same, llama.cpp by turns on the same machine",
        "alone-gpt2-124m-llama-cpp",
        "x",
        0.9,
        1.0,
        _ratio,
        lambda figures: (
            f"{figures['tokens_per_second']:.0f} against {figures['llama_cpp']['tokens_per_second']:.0f} tok/s"
        ),
    ),
    Goal(
        "share of the bf16 matrix peak, engine, random prompts",
        "engine-gpt2-124m-random-64-vllm",
        "%",
        0.64,
        0.75,
        lambda figures: float(figures["peak_share"]),
        lambda figures: f"of {figures['matrix_peak_gflops']:.0f} GFLOP/s",
    ),
    Goal(
        "`run-batch` against the engine alone, 1,024 lines, first claim to last commit",
        "queue-cost-gpt2-124m-shared-1024",
        "x",
        0.95,
        0.98,
        _ratio,
        lambda figures: f"{min(figures['run_batch_seconds']):.1f} against {min(figures['engine_seconds']):.1f} s",
    ),
    Goal(
        "time in Python per step at 64 rows",
        "step-profile-gpt2-124m",
        "%",
        0.05,
        0.02,
        lambda figures: float(figures["decode"]["parts"]["python"]["share"]),
        lambda figures: f"of {figures['decode']['step_ms']:.1f} ms",
        less=True,
    ),
    Goal(
        "start-up to first token, 124M parameters, warm disk",
        "start-up-gpt2-124m",
        "s",
        5.0,
        3.0,
        lambda figures: float(figures["median_seconds"]),
        lambda figures: f"engine alone {figures['engine_alone_seconds']:.1f} s",
        less=True,
    ),
    _slower("64 rows, each by a JSON schema of 20 fields, slower than without", "every_row", 0.08, 0.04),
    _slower("one such row among 64", "one_row", 0.01, 0.0),
    Goal(
        "first token by a schema that is new, later than without, 95 % of 500",
        _STRUCTURED,
        "ms",
        50.0,
        15.0,
        lambda figures: float(figures["first_token"]["later_ms_95"]),
        lambda figures: f"median {figures['first_token']['later_ms']:.0f} ms",
        less=True,
    ),
    Goal(
        "64 rows by schemas of 20 fields, against vLLM",
        f"{_STRUCTURED}-vllm",
        "x",
        1.0,
        1.5,
        _ratio,
        _rates,
    ),
    *LIVE,
)


def main() -> None:
    print(table(arguments(__doc__).parse_args().out), end="")


def table(folder: Path = RESULTS) -> str:
    """Return one line per goal; where there is no file of results yet, no figure."""
    lines = ["| | at least | hoped for | measured | |", "| --- | --- | --- | --- | --- |"]
    lines += [_line(goal, figures_of(goal.file, folder)) for goal in GOALS]
    return "\n".join(lines) + "\n"


def figures_of(name: str, folder: Path = RESULTS) -> Figures | None:
    """Those of a file of results, if it is there."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text())["figures"] if path.exists() else None


def _line(goal: Goal, figures: Figures | None) -> str:
    sign = "≤ " if goal.less else ""
    start = f"| {goal.title} | {sign}{goal.text(goal.at_least)} | {sign}{goal.text(goal.hoped)}"
    if figures is None:
        return f"{start} | – | |"
    value = goal.value(figures)
    return f"{start} | {goal.text(value)}{'' if goal.met(value) else ' (short)'} | {goal.beside(figures)} |"


if __name__ == "__main__":
    main()
