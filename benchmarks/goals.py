"""The goals of throughput on a CPU, with the measured results.

`python -m benchmarks.goals` prints the table of `docs/performance.md`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.measured import Figures, MeasuredProcessor, measured_processors
from benchmarks.processor import AVX2, AVX512, AVX512_BF16
from benchmarks.report import RESULTS, arguments

_LIVE = "live-gpt2-124m"
_INT8, _INT4 = "int8-gpt2-124m", "int4-llama-135m"
_STRUCTURED = "structured-outputs-gpt2-124m-151936"


@dataclass(frozen=True, slots=True)
class Target:
    """The target of a figure."""

    at_least: float
    hoped: float


Targets = dict[str, Target]
"""By a processor's instructions, or `_OTHERS`."""

_OTHERS = "others"


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure in a file of results, and its target; `less`: smaller is better."""

    title: str
    file: str
    unit: str  # one of `text`
    targets: Targets
    value: Callable[[Figures], float]
    beside: Callable[[Figures], str]
    less: bool = False

    def target(self, instructions: str) -> Target | None:
        """Return the target on processors with these instructions, or None."""
        return self.targets.get(instructions, self.targets.get(_OTHERS))

    def met(self, value: float, target: Target) -> bool:
        return value <= target.at_least if self.less else value >= target.at_least

    def text(self, value: float) -> str:
        """Return a figure in the goal's unit."""
        return {
            "x": f"{value:.2f}x",
            "%": f"{100 * value:.1f} %",
            "s": f"{value:.1f} s",
            "ms": f"{value:.0f} ms",
            "nats": f"{value:.2g} nats",
        }[self.unit]


def _targets(at_least: float, hoped: float) -> Targets:
    """Return the same target for all processors."""
    return {_OTHERS: Target(at_least, hoped)}


def _in_float32(at_least: float, hoped: float) -> Targets:
    """Return a target for processors that compute in float32."""
    return {AVX2: Target(at_least, hoped), AVX512: Target(at_least, hoped)}


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


def _engine(title: str, model: str, kind: str, requests: int, targets: Targets) -> Goal:
    return Goal(title, f"engine-{model}-{kind}-{requests}-vllm", "x", targets, _ratio, _rates)


def _run_batch(lines: int, targets: Targets) -> Goal:
    title = f"`run-batch`, {lines:,} chat lines, whole process, against `vllm run-batch`"
    return Goal(title, f"run-batch-gpt2-124m-shared-{lines}-vllm", "x", targets, _ratio, _seconds)


def _embeds(title: str, file: str, at_least: float, hoped: float) -> Goal:
    """Return a goal for whole processes; the default shape is MiniLM-L6."""
    peer, name = ("vLLM", "vllm") if file.endswith("vllm") else ("sentence-transformers",) * 2

    def seconds(figures: Figures) -> str:
        ours, theirs = (median(figures[program]["seconds"]) for program in ("pipeline", name))
        return f"{ours:.0f} against {theirs:.0f} s, {_agreement(figures)}"

    return Goal(f"{title}, against {peer}", file, "x", _targets(at_least, hoped), _ratio, seconds)


def _agreement(figures: Figures) -> str:
    cosine: float | None = figures.get("least_cosine")
    if cosine is None:
        return f"largest difference {figures['largest_difference']:.0e}"
    return f"least cosine {cosine:.6f}"


def _divergence(title: str, file: str, targets: Targets) -> Goal:
    return Goal(
        title,
        file,
        "nats",
        targets,
        lambda figures: float(figures["against_float32"]["divergence"]),
        lambda figures: f"first choice kept: {100 * figures['against_float32']['same_token_share']:.0f} %",
        less=True,
    )


def _against(figures: Figures, name: str, first: str, second: str) -> str:
    return f"{figures[first][name]:,.0f} against {figures[second][name]:,.0f}"


def _served(figures: Figures) -> str:
    return f"{_against(figures, 'output_tokens_per_second', 'pipeline', 'vllm')} tok/s"


def _all_tokens(figures: Figures) -> str:
    kinds = ("prompt", "output")
    rates = [_against(figures, f"{kind}_tokens_per_second", "live_and_batch", "batch_alone") for kind in kinds]
    return f"prompts {rates[0]}, answers {rates[1]} tok/s"


def _streams(figures: Figures) -> str:
    rates = [figures[f"{name}output_tokens_per_second"] for name in ("", "engine_")]
    return f"{rates[0]:,.0f} against {rates[1]:,.0f} tok/s"


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
        _targets(at_least, hoped),
        lambda figures: float(figures[part][name]),
        lambda figures: beside(figures[part]),
        less,
    )


def _allowed(title: str, name: str, value: str, hoped: float) -> Goal:
    """Return a goal for a latency beside a batch, as a share of the limit."""

    def beside(figures: Figures) -> str:
        return f"{figures['beside'][f'{value}_ms']:,.0f} ms of {figures[f'{name}_allowed_ms']:,.0f} ms"

    return _live(title, "beside", f"{name}_share", 1.0, hoped, beside, less=True)


def _slower(title: str, part: str, at_least: float, hoped: float) -> Goal:
    def beside(figures: Figures) -> str:
        return f"steps of {figures[part]['step_ms']:.1f} against {figures[part]['step_ms_without']:.1f} ms"

    return Goal(
        title,
        _STRUCTURED,
        "%",
        _targets(at_least, hoped),
        lambda figures: float(figures[part]["slower"]),
        beside,
        less=True,
    )


AGAINST_VLLM = (
    _engine(
        "engine, 64 random prompts, against vLLM",
        "gpt2-124m",
        "random",
        64,
        _targets(1.3, 1.5) | _in_float32(1.25, 1.5),
    ),
    _engine(
        "engine, 256 requests with one system prompt, against vLLM",
        "gpt2-124m",
        "shared",
        256,
        _targets(1.4, 1.7) | _in_float32(1.4, 1.8),
    ),
    _engine("the same, `llama-135m`, 64 random prompts", "llama-135m", "random", 64, _targets(1.0, 1.3)),
    _engine("the same, `qwen3-0.6b`, 64 random prompts", "qwen3-0.6b", "random", 64, _targets(1.0, 1.3)),
    _run_batch(128, _targets(4.5, 5.5) | _in_float32(3.5, 4.5)),
    _run_batch(1024, _targets(1.7, 2.0)),
    Goal(
        "`pipeline serve`, 64 streams, against `vllm serve`", f"{_LIVE}-vllm", "x", _targets(1.0, 1.3), _ratio, _served
    ),
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
        _targets(1.0, 0.7),
        lambda figures: float(figures["first_token_ratio"]),
        lambda figures: f"{_against(figures, 'first_token_p99_ms', 'pipeline', 'vllm')} ms",
        less=True,
    ),
    Goal(
        "`pipeline serve` without a request, all processes, of a core",
        "idle-gpt2-124m",
        "%",
        _targets(0.01, 0.005),
        lambda figures: float(figures["cores"]),
        lambda figures: f"over {figures['seconds']:.0f} s",
        less=True,
    ),
)
GOALS = (
    *AGAINST_VLLM,
    Goal(
        "one text embedded over HTTP, MiniLM-L6 shape, median",
        "one-text-minilm-l6",
        "ms",
        _targets(10.0, 7.0),
        lambda figures: float(figures["p50_ms"]),
        lambda figures: f"p99 {figures['p99_ms']:.1f} ms",
        less=True,
    ),
    _embeds("10,000 texts embedded by `run-batch`", "embeddings-minilm-l6-10000-sentence-transformers", 1.5, 2.0),
    _embeds("5,000 texts embedded by `run-batch`", "embeddings-minilm-l6-5000-vllm", 1.2, 1.5),
    _embeds(
        "1,000 texts embedded by `run-batch`, BGE-base shape",
        "embeddings-bge-base-1000-sentence-transformers",
        1.5,
        2.0,
    ),
    _embeds("1,500 pairs scored by `run-batch`", "scores-minilm-l6-1500-sentence-transformers", 1.5, 2.0),
    Goal(
        "one request alone, decode, against llama.cpp's 159 tok/s in bf16, measured elsewhere",
        "alone-gpt2-124m",
        "x",
        {AVX512_BF16: Target(0.9, 1.0)},
        _ratio,
        lambda figures: f"{figures['tokens_per_second']:.0f} tok/s, {figures['ms_per_token']:.1f} ms per token",
    ),
    Goal(
        "the same, llama.cpp in 16 bits by turns on the same machine",
        "alone-gpt2-124m-llama-cpp",
        "x",
        _targets(0.9, 1.0) | _in_float32(1.0, 1.1),
        _ratio,
        lambda figures: (
            f"{figures['tokens_per_second']:.0f} against {figures['llama_cpp']['tokens_per_second']:.0f} tok/s"
        ),
    ),
    Goal(
        "the same with `--quantization int8`, llama.cpp in its Q8_0",
        "alone-gpt2-124m-int8-llama-cpp",
        "x",
        _targets(1.0, 1.15),
        _ratio,
        lambda figures: (
            f"{figures['tokens_per_second']:.0f} against {figures['llama_cpp']['tokens_per_second']:.0f} tok/s"
        ),
    ),
    Goal(
        "engine with `--quantization int8`, 64 random prompts, against weights in 16 bits",
        _INT8,
        "x",
        _targets(1.7, 2.0) | {AVX2: Target(1.5, 2.0)},
        _ratio,
        lambda figures: _against(figures, "output_tokens_per_second", "int8", "engine") + " tok/s",
    ),
    _divergence(
        "mean divergence of its next tokens from float32's, `llama-135m` with random weights",
        _INT8,
        _targets(0.01, 0.001),
    ),
    _divergence("the same of a checkpoint of 4 bits in groups of 64", _INT4, _targets(0.05, 0.02)),
    Goal(
        "share of the matrix peak, engine, 64 random prompts",
        "engine-gpt2-124m-random-64-vllm",
        "%",
        _targets(0.64, 0.75) | _in_float32(0.75, 0.85),
        lambda figures: float(figures["peak_share"]),
        lambda figures: f"of {figures['matrix_peak_gflops']:.0f} GFLOP/s",
    ),
    Goal(
        "`run-batch` against the engine alone, 1,024 lines, first claim to last commit",
        "queue-cost-gpt2-124m-shared-1024",
        "x",
        _targets(0.95, 0.98),
        _ratio,
        lambda figures: f"{min(figures['run_batch_seconds']):.1f} against {min(figures['engine_seconds']):.1f} s",
    ),
    Goal(
        "`map` of the Python client to its last answer, 10,000 short prompts, against `run-batch`",
        "client-map",
        "x",
        _targets(0.97, 1.0),
        lambda figures: float(figures["to_last_answer"]["ratio"]),
        lambda figures: f"the whole program {figures['whole_program']['ratio']:.2f}x",
    ),
    Goal(
        "time in Python per step at 64 rows",
        "step-profile-gpt2-124m",
        "%",
        _targets(0.05, 0.02),
        lambda figures: float(figures["decode"]["parts"]["python"]["share"]),
        lambda figures: f"of {figures['decode']['step_ms']:.1f} ms",
        less=True,
    ),
    Goal(
        "start-up to first token, 124M parameters, warm disk",
        "start-up-gpt2-124m",
        "s",
        _targets(2.5, 2.0),
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
        _targets(50.0, 15.0),
        lambda figures: float(figures["first_token"]["later_ms_95"]),
        lambda figures: f"median {figures['first_token']['later_ms']:.0f} ms",
        less=True,
    ),
    Goal(
        "64 rows by schemas of 20 fields, against vLLM",
        f"{_STRUCTURED}-vllm",
        "x",
        _targets(1.0, 1.5),
        _ratio,
        _rates,
    ),
    *LIVE,
)


def main() -> None:
    print(table(arguments(__doc__).parse_args().out), end="")


def table(results: Path = RESULTS) -> str:
    """Return one row for each goal and measured processor: the target, and the last figure.

    A cell that repeats the one above it, in the same goal, is empty.
    """
    rows = [("figure", "processor", "at least / hoped for", "measured"), ("---",) * 4]
    processors = measured_processors(results)
    for goal in GOALS:
        title, before = goal.title, ""
        for processor, aim, measured in filter(None, (_cells(goal, one) for one in processors)):
            rows.append((title, processor, aim if aim != before else "", measured))
            title, before = "", aim
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _cells(goal: Goal, one: MeasuredProcessor) -> tuple[str, str, str] | None:
    """Return a processor's cells, or None without a target or a figure."""
    target, result = goal.target(one.processor.instructions), one.result(goal.file)
    if target is None or result is None:
        return None
    aim = f"{'≤ ' if goal.less else ''}{goal.text(target.at_least)} / {goal.text(target.hoped)}"
    value = goal.value(result.figures)
    short = "" if goal.met(value, target) else " (short)"
    return one.processor.title, aim, f"{goal.text(value)}{short}: {goal.beside(result.figures)}, {result.date}"


if __name__ == "__main__":
    main()
