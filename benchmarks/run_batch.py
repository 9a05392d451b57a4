"""`pipeline run-batch` as a whole process, from the command to the results file: wall seconds and output tokens/s.

    python -m benchmarks.run_batch --model gpt2-124m --kind shared --requests 128
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.models import SHAPES, model_folder
from benchmarks.report import write_report
from benchmarks.workload import write_workload


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="gpt2-124m")
    parser.add_argument("--kind", choices=("random", "shared"), default="shared")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    figures = measure(args.model, args.kind, args.requests, args.runs)
    print(json.dumps(figures))
    write_report(f"run-batch-{args.model}-{args.kind}-{args.requests}", figures)


def measure(model: str, kind: str, requests: int, runs: int) -> dict[str, Any]:
    seconds, output_tokens = [], 0
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as scratch:
            source = write_workload(Path(scratch) / "input.jsonl", kind, requests, model)
            results = Path(scratch) / "results.jsonl"
            seconds.append(_timed_run(source, results, model))
            output_tokens = sum(
                json.loads(line)["response"]["body"]["usage"]["completion_tokens"] for line in results.open()
            )
    median = statistics.median(seconds)
    return {
        "wall_seconds": [round(value, 2) for value in seconds],
        "median_wall_seconds": round(median, 2),
        "output_tokens": output_tokens,
        "output_tokens_per_second": round(output_tokens / median, 1),
    }


def _timed_run(source: Path, results: Path, model: str) -> float:
    command = [
        sys.executable, "-m", "pipeline.main", "run-batch", str(source), "-o", str(results),
        "--model", str(model_folder(model)), "--served-model-name", model, "--max-model-len", "1024",
    ]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"run-batch exited {done.returncode}:\n{done.stderr[-4000:]}")
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
