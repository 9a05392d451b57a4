"""The time of one step by part: a decode step of 64 rows at 256 tokens of context, and a step of
prompts alone.

    python -m benchmarks.step_profile

The whole engine core runs in this process, with its scheduler and with messages as it sends them.
Some steps are timed without a profiler, others under torch's profiler, which assigns each torch
operation and each call of a C kernel to a part. The rest of a step is Python: the scheduler, the
inputs, the calls of layers, without the cost of marking the spans. The queue is measured on a
`run-batch`: the processor time of all other processes for as many output tokens as in a step.
"""

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.driving import CONTEXT, greedy
from benchmarks.models import SHAPES, model_folder
from benchmarks.native_calls import PREFIX, name_native_calls
from benchmarks.peak import matrix_peak, memory_peak
from benchmarks.profile_table import PARTS, profile_table
from benchmarks.queue_cost import observed
from benchmarks.report import arguments, write_report
from benchmarks.run_batch import output_tokens, pipeline_run_batch
from benchmarks.work import Shape, shape_of
from benchmarks.workload import write_workload
from workers.engine.core import EngineCore
from workers.engine.device.executor import Executor
from workers.engine.messages.config import EngineConfig
from workers.engine.messages.transport import frame
from workers.engine.native.stack import NativeStack
from workers.engine.profiling import mark_spans

ROWS, AT = 64, 256  # of the decode step, and its tokens of context
STEPS = 16  # of each kind, timed and then profiled; `AT` is reached in their middle
_STEP = "one step"
_ATTENTION = "part: attention"
_LAYERS = PREFIX + "run_stack"
_MATRIX = ("aten::linear", "aten::mm", "aten::addmm", "aten::matmul", "matmul")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", choices=SHAPES, default="gpt2-124m")
    parser.add_argument(
        "--lines", type=int, default=128, help="of the run-batch that the queue's part is measured on; 0 for none"
    )
    args = parser.parse_args()
    folder = str(model_folder(args.model))
    peak, bandwidth = matrix_peak(), memory_peak()
    name_native_calls()
    core = EngineCore(Executor(EngineConfig(model=folder, max_model_len=CONTEXT, max_num_seqs=ROWS)))
    draw = np.random.default_rng(args.seed)
    plain = Round(core, draw, profiled=False)
    mark_spans()
    _mark_attention(core)
    parts = Round(core, draw, profiled=True)
    peak, bandwidth = max(peak, matrix_peak()), max(bandwidth, memory_peak())
    bounds = StepBounds(shape_of(args.model), peak, bandwidth)
    figures: dict[str, Any] = {
        "rows": ROWS,
        "context": AT,
        "matrix_peak_gflops": round(peak / 1e9, 1),
        "bandwidth_gb_s": round(bandwidth / 1e9, 1),
    }
    for kind in ("decode", "prefill"):
        figures[kind] = describe(plain.of(kind), parts.of(kind), bounds, kind)
    if args.lines:
        figures["queue"] = queue_part(args.model, args.lines, args.seed)
    write_report(f"step-profile-{args.model}", figures, args.out, args.seed)
    print(profile_table(figures))


class ProfiledStep:
    """One step: its seconds, its tokens and, under the profiler, the seconds of its parts."""

    def __init__(self, seconds: float, tokens: int, sampled: int) -> None:
        self.seconds, self.tokens, self.sampled = seconds, tokens, sampled
        # Seconds by part inside a single call of all layers, if there is one
        self.layers: dict[str, float] = {}
        self.parts: dict[str, float] = {}


class Round:
    """`ROWS` requests from their prompts to `STEPS` decode steps, every step timed."""

    def __init__(self, core: EngineCore, draw: np.random.Generator, profiled: bool) -> None:
        prompt, first = AT - STEPS // 2, int(draw.integers(1 << 30))
        budget = core.ready.max_num_batched_tokens
        vocabulary = core.ready.vocab_size
        core.add(greedy(draw.integers(0, vocabulary, prompt).tolist(), STEPS + 16, first + row) for row in range(ROWS))
        if profiled:
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                cost = _span_seconds()
                steps = _run(core)
            for step, event in zip(steps, _step_events(profiler)[1:], strict=True):
                step.parts = parts_of(event, cost, step.layers)
        else:
            steps = _run(core)
        assert not core.busy
        self._kinds = {
            "prefill": [step for step in steps if step.tokens == budget],
            "decode": [step for step in steps if step.tokens == step.sampled == ROWS][:STEPS],
        }

    def of(self, kind: str) -> list[ProfiledStep]:
        return self._kinds[kind]


def _run(core: EngineCore) -> list[ProfiledStep]:
    steps: list[ProfiledStep] = []
    computed: int | None = None
    stack = getattr(core._executor.runner.model, "stack", None)
    while core.busy:
        inside = layer_seconds(stack)
        began = time.perf_counter()
        with record_function(_STEP):
            output = core.step()
            assert output is not None
            frame(output)  # encoded as for the worker process
        seconds = time.perf_counter() - began
        before, computed = computed, output.stats.computed_tokens
        if before is not None:  # the first step also assigns the requests' slots
            steps.append(ProfiledStep(seconds, computed - before, len(output.token_ids)))
            steps[-1].layers = {part: seconds - inside[part] for part, seconds in layer_seconds(stack).items()}
    return steps


def layer_seconds(stack: Any) -> dict[str, float]:
    """Return the total seconds of all layers by part, if one call runs them."""
    return stack.seconds if isinstance(stack, NativeStack) else {}


def _mark_attention(core: EngineCore) -> None:
    """Count all work inside a call of the attention backend as attention."""
    for attention in {layer.attention for layer in core._executor.runner.layers}:
        for name in ("forward", "forward_rotary"):
            if hasattr(attention, name):
                setattr(attention, name, _marked(getattr(attention, name)))


def _marked(function: Any) -> Any:
    def marked(*arguments: Any, **keywords: Any) -> Any:
        with record_function(_ATTENTION):
            return function(*arguments, **keywords)

    return marked


def _step_events(profiler: Any) -> list[Any]:
    return sorted(
        (event for event in profiler.events() if event.name == _STEP), key=lambda event: event.time_range.start
    )


def _span_seconds(times: int = 1000) -> float:
    """Return the seconds that marking a span takes under the profiler."""
    began = time.perf_counter()
    for _ in range(times):
        with record_function("a span"):
            pass
    return (time.perf_counter() - began) / times


def parts_of(step: Any, span_seconds: float = 0.0, layers: dict[str, float] | None = None) -> dict[str, float]:
    """Return seconds by part of a profiled step, an event with its children below it.

    The cost of marking its spans counts for no part. `layers`: the parts that one call of all
    layers reports.
    """
    parts: dict[str, float] = defaultdict(float)
    spans = _collect(step.cpu_children, "", parts)
    parts.pop(_LAYERS, None)
    for part, seconds in (layers or {}).items():
        parts[part] += seconds
    parts["python"] = max(0.0, step.time_range.elapsed_us() / 1e6 - sum(parts.values()) - spans * span_seconds)
    return dict(parts)


def _collect(events: Iterable[Any], inside: str, parts: dict[str, float]) -> int:
    """Add the outermost operations to `parts`; return the number of hand-marked spans.

    `inside` is the innermost span around the events.
    """
    spans = 0
    for event in events:
        spans += not event.name.startswith("aten::")
        if event.name.startswith(("aten::", PREFIX)):
            parts[_part(event.name, inside)] += event.time_range.elapsed_us() / 1e6
        else:
            spans += _collect(event.cpu_children, event.name, parts)
    return spans


def _part(operation: str, inside: str) -> str:
    if operation == _LAYERS:
        return _LAYERS
    if inside == _ATTENTION or "attention" in operation or "attend" in operation:
        return "attention"
    if any(word in operation for word in _MATRIX):
        return "matrix"
    return {"sample": "sampling", "inputs": "inputs", "retire": "inputs"}.get(inside, "norms and elementwise")


class StepBounds:
    """The least time of a part, from the measured peaks; None without a bound."""

    def __init__(self, shape: Shape, peak: float, bandwidth: float) -> None:
        self._shape, self._peak, self._bandwidth = shape, peak, bandwidth

    def of(self, part: str, kind: str, tokens: int, sampled: int) -> float | None:
        """Return the least seconds of a part; attention reads all keys and values once."""
        if part == "matrix":
            return max(self._shape.operations(tokens, sampled) / self._peak, self._shape.weight_bytes / self._bandwidth)
        if part == "attention" and kind == "decode":
            return ROWS * AT * self._shape.kv_bytes_per_token / self._bandwidth
        return None


def describe(plain: list[ProfiledStep], profiled: list[ProfiledStep], bounds: StepBounds, kind: str) -> dict[str, Any]:
    """Return milliseconds of the median unprofiled step, and of the parts of profiled steps.

    The parts are means over the middle half of the profiled steps, so that they add up.
    """
    middle = sorted(profiled, key=lambda step: step.seconds)[len(profiled) // 4 : -(-3 * len(profiled) // 4)]
    whole = statistics.fmean(sum(step.parts.values()) for step in middle)
    tokens, sampled = profiled[0].tokens, profiled[0].sampled
    parts = {}
    for part in PARTS:
        seconds = statistics.fmean(step.parts.get(part, 0.0) for step in middle)
        bound = bounds.of(part, kind, tokens, sampled)
        parts[part] = {"ms": round(1e3 * seconds, 2), "share": round(seconds / whole, 4)}
        if bound is not None:
            parts[part]["bound_ms"] = round(1e3 * bound, 2)
    return {
        "step_ms": round(1e3 * statistics.median(step.seconds for step in plain), 2),
        "profiled_step_ms": round(1e3 * whole, 2),
        "tokens": tokens,
        "parts": parts,
    }


def queue_part(model: str, lines: int, seed: int) -> dict[str, Any]:
    """Return the processor time of worker process, Redis and control plane per `ROWS` tokens.

    The measurement begins at the first claim.
    """
    with tempfile.TemporaryDirectory() as scratch:
        source = write_workload(Path(scratch) / "input.jsonl", "shared", lines, model, seed)
        results = Path(scratch) / "results.jsonl"
        used = observed(pipeline_run_batch(source, results, model, "--log-level", "debug"))["processor_seconds"]
        steps = output_tokens(results) / ROWS
    by_part = {part: round(1e3 * seconds / steps, 2) for part, seconds in used.items() if part != "engine core"}
    return {"processor_ms_per_step": round(sum(by_part.values()), 2), "by_process": by_part, "lines": lines}


if __name__ == "__main__":
    main()
