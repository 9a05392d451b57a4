"""`pipeline run-batch` with a worker that answers at once (`null_worker`) in place of its own.

python -m benchmarks.null_run_batch - --served-model-name null
"""

import sys
from functools import partial

from pipeline import supervisor
from pipeline.child import Child
from pipeline.main import main


class NullSupervisor(supervisor.Supervisor):
    """Starts one null worker, whatever is requested."""

    def start_workers(self, *_: object, **__: object) -> list[Child]:
        return [self._add("worker", partial(supervisor._python, "benchmarks.null_worker"))]


if __name__ == "__main__":
    from pipeline.piped import start

    start.Supervisor = NullSupervisor  # type: ignore[misc]
    sys.argv.insert(1, "run-batch")
    main()
