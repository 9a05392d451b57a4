"""The machine's peak rates: of a large matrix product as the engine computes it, and of memory
beyond any cache.

python -m benchmarks.peak
"""

import time
from collections.abc import Callable

import torch

from benchmarks.driving import engine_dtype
from benchmarks.report import arguments, write_report
from workers.engine.checkpoint.dtypes import cpu_dtype

_SIZES = (1024, 1536, 2048, 3072)
_COPY_BYTES = 512 << 20


def main() -> None:
    args = arguments(__doc__).parse_args()
    figures = {
        "dtype": engine_dtype(),
        "operations_per_second": matrix_peak(),
        "bytes_per_second": memory_peak(),
        "threads": torch.get_num_threads(),
    }
    write_report("peak", figures, args.out)


def matrix_peak(seconds: float = 1.0) -> float:
    """Return operations per second of the best product of square matrices in the engine's dtype.

    Each size is tried for about `seconds`; a size with a longer product is left out.
    """
    best = 0.0
    for size in _SIZES:
        if 2 * size**3 <= best * seconds or not best:
            best = max(best, _product_rate(size, seconds))
    return best


def memory_peak(seconds: float = 1.0) -> float:
    """Return bytes per second of a sum or of a copy, whichever is more.

    A copy counts bytes read and written.
    """
    source = torch.ones(_COPY_BYTES // 4)
    target = torch.empty_like(source)
    return max(2 * _COPY_BYTES / _best(lambda: target.copy_(source), seconds), _COPY_BYTES / _best(source.sum, seconds))


def _product_rate(size: int, seconds: float) -> float:
    left, right, out = (torch.randn(size, size).to(cpu_dtype()) for _ in range(3))
    return 2 * size**3 / _best(lambda: torch.mm(left, right, out=out), seconds)


def _best(work: Callable[[], object], seconds: float) -> float:
    until = time.perf_counter() + seconds
    work()
    times: list[float] = []
    while time.perf_counter() < until or not times:
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


if __name__ == "__main__":
    main()
