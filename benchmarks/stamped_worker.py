"""`pipeline worker` with the engine core of `stamped_core`.

BENCHMARK_STAMPS=FILE python -m benchmarks.stamped_worker MODEL --redis-url URL
"""

import sys

from pipeline.main import main
from workers.engine.client import launch

if __name__ == "__main__":
    launch.CORE_MODULE = "benchmarks.stamped_core"
    sys.argv.insert(1, "worker")
    main()
