"""What the machine can do at most: the best rate of a large bf16 matrix product, and of memory too
large for any cache.

python -m benchmarks.peak
"""

import time
from collections.abc import Callable

import torch

from benchmarks.report import arguments, write_report

_SIZES = (1024, 2048, 3072)
_COPY_BYTES = 512 << 20


def main() -> None:
    args = arguments(__doc__).parse_args()
    figures = {
        "operations_per_second": matrix_peak(),
        "bytes_per_second": memory_peak(),
        "threads": torch.get_num_threads(),
    }
    write_report("peak", figures, args.out)


def matrix_peak(seconds: float = 1.0) -> float:
    """Operations a second of the best product of square bf16 matrices, each size tried for so
    long.
    """
    return max(_product_rate(size, seconds) for size in _SIZES)


def memory_peak(seconds: float = 1.0) -> float:
    """Bytes a second: of a sum over them, or of a copy, read and written together, whichever is
    more.
    """
    source = torch.ones(_COPY_BYTES // 4)
    target = torch.empty_like(source)
    return max(2 * _COPY_BYTES / _best(lambda: target.copy_(source), seconds), _COPY_BYTES / _best(source.sum, seconds))


def _product_rate(size: int, seconds: float) -> float:
    left, right, out = (torch.randn(size, size).bfloat16() for _ in range(3))
    return 2 * size**3 / _best(lambda: torch.mm(left, right, out=out), seconds)


def _best(work: Callable[[], object], seconds: float) -> float:
    work()
    times, until = [], time.perf_counter() + seconds
    while time.perf_counter() < until or len(times) < 3:
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


if __name__ == "__main__":
    main()
