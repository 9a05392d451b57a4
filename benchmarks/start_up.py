"""From the command to the first token with a 124M-parameter model on a warm disk: one line through `run-batch`.

    python -m benchmarks.start_up
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.models import model_folder
from benchmarks.report import write_report
from benchmarks.workload import write_workload

RUNS = 3


def main() -> None:
    model_folder("gpt2-124m")
    seconds = [_seconds_to_first_token() for _ in range(RUNS)]
    figures = {"seconds": [round(value, 2) for value in seconds], "median_seconds": round(statistics.median(seconds), 2)}
    print(json.dumps(figures))
    write_report("start-up-gpt2-124m", figures)


def _seconds_to_first_token() -> float:
    """The whole run of one line of one token: an upper bound, since it also ends every process again."""
    with tempfile.TemporaryDirectory() as scratch:
        source = write_workload(Path(scratch) / "input.jsonl", "random", 1, "gpt2-124m", tokens=(1, 1))
        command = [
            sys.executable, "-m", "pipeline.main", "run-batch", str(source), "-o", str(Path(scratch) / "results.jsonl"),
            "--model", str(model_folder("gpt2-124m")), "--served-model-name", "gpt2-124m", "--max-model-len", "1024",
        ]
        began = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True)
        seconds = time.perf_counter() - began
    if done.returncode:
        sys.exit(f"run-batch exited {done.returncode}:\n{done.stderr[-4000:]}")
    return seconds


if __name__ == "__main__":
    main()
