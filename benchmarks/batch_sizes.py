"""Decode steps of 1, 8, 64 and 256 rows at contexts of 128 and 2,048 tokens: milliseconds,
tokens/s, and the share of their bound.

    python -m benchmarks.batch_sizes

A step's bound is the sum of two times. The first is the longer of the matrix products at the
machine's measured peak, and of reading the weights once. The second is the time to read every row's
keys and values once.
"""

import statistics
import time
from typing import Any

from benchmarks.models import SHAPES
from benchmarks.peak import matrix_peak, memory_peak
from benchmarks.report import arguments, write_report
from benchmarks.stepping import decode_step, make_executor
from benchmarks.work import shape_of

SIZES = (1, 8, 64, 256)
GRID = (("gpt2-124m", 128), ("llama-135m", 128), ("llama-135m", 2048))  # GPT-2 has 1,024 positions


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", choices=SHAPES, help="this one alone")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--seconds", type=float, default=2.0, help="spent on each size at each context")
    args = parser.parse_args()
    peak, bandwidth = matrix_peak(), memory_peak()
    steps = []
    for model, context in GRID:
        for size in args.sizes if args.model in (None, model) else ():
            steps.append((model, size, context, measure(model, size, context, args.seconds)))
            print(*steps[-1], flush=True)
    peak, bandwidth = max(peak, matrix_peak()), max(bandwidth, memory_peak())
    rows = [describe(*step, peak, bandwidth) for step in steps]
    peaks = {"matrix_peak_gflops": round(peak / 1e9, 1), "bandwidth_gb_s": round(bandwidth / 1e9, 1)}
    write_report("batch-sizes", peaks | {"steps": rows}, args.out)


def measure(model: str, rows: int, context: int, seconds: float) -> float:
    """Return the seconds of the median step."""
    executor = make_executor(model, rows, context)
    step = decode_step(executor, rows, context)
    times, until = [], time.perf_counter() + seconds
    while time.perf_counter() < until or len(times) < 5:
        began = time.perf_counter()
        executor.retire(executor.launch(step))
        times.append(time.perf_counter() - began)
    executor.close()
    return statistics.median(times)


def describe(model: str, rows: int, context: int, median: float, peak: float, bandwidth: float) -> dict[str, Any]:
    """Return the figures of a step and its bound.

    `peak` is in operations per second, `bandwidth` in bytes per second.
    """
    shape = shape_of(model)
    bound = (
        max(shape.operations(rows, rows) / peak, shape.weight_bytes / bandwidth)
        + rows * context * shape.kv_bytes_per_token / bandwidth
    )
    return {
        "model": model,
        "rows": rows,
        "context": context,
        "step_ms": round(1e3 * median, 2),
        "tokens_per_second": round(rows / median, 1),
        "bound_ms": round(1e3 * bound, 2),
        "share_of_bound": round(bound / median, 3),
    }


if __name__ == "__main__":
    main()
