"""`pipeline run-batch` as a whole process, from the command to the results file: wall seconds and
output tokens/s.

    python -m benchmarks.run_batch --requests 128
    PEERS=~/peers python -m benchmarks.run_batch --requests 1024 --against vllm

With `--against vllm`, `vllm run-batch` takes turns with it on the same file.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.driving import CONTEXT, engine_dtype
from benchmarks.models import SHAPES, model_folder
from benchmarks.peers import peer_dtype, peer_versions, vllm_environment, vllm_run_batch
from benchmarks.report import arguments, by_turns, write_report
from benchmarks.workload import write_workload


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", choices=SHAPES, default="gpt2-124m")
    parser.add_argument(
        "--kind",
        choices=("random", "shared"),
        default="shared",
        help="prompts with nothing or a system prompt in common",
    )
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--against", choices=("vllm",), help="the program to take turns with")
    args = parser.parse_args()
    name = f"run-batch-{args.model}-{args.kind}-{args.requests}"
    versions = peer_versions(args.against)
    with tempfile.TemporaryDirectory() as scratch:
        source = write_workload(Path(scratch) / "input.jsonl", args.kind, args.requests, args.model, args.seed)
        figures = measure(source, args.model, args.turns, with_vllm=bool(args.against))
    write_report(f"{name}-vllm" if args.against else name, figures, args.out, args.seed, **versions)


def measure(source: Path, model: str, turns: int, with_vllm: bool) -> dict[str, Any]:
    model_folder(model)
    ours: list[tuple[float, int]] = []
    theirs: list[tuple[float, int]] = []
    for _ in range(turns):
        with tempfile.TemporaryDirectory() as scratch:
            results = Path(scratch) / "results.jsonl"
            ours.append((timed(pipeline_run_batch(source, results, model)), output_tokens(results)))
            if with_vllm:
                results = Path(scratch) / "vllm.jsonl"
                theirs.append(
                    (timed(vllm_run_batch(source, results, model), vllm_environment()), output_tokens(results))
                )
    figures = {"dtype": engine_dtype(), "output_tokens": ours[0][1], "pipeline": _summary(ours)}
    if theirs:
        assert {tokens for _, tokens in ours} == {tokens for _, tokens in theirs}
        figures |= {"vllm": {"dtype": peer_dtype()} | _summary(theirs)}
        figures |= by_turns([our[0] for our in ours], [one[0] for one in theirs])
    return figures


def pipeline_run_batch(source: Path, results: Path, model: str, *options: str) -> list[str]:
    """Return the command that answers a batch file."""
    return [
        sys.executable,
        "-m",
        "pipeline",
        "run-batch",
        str(source),
        "-o",
        str(results),
        "--model",
        str(model_folder(model)),
        "--served-model-name",
        model,
        "--max-model-len",
        str(CONTEXT),
        "--no-deduplicate",
        *options,
    ]


def timed(command: list[str], environment: Mapping[str, str] = os.environ) -> float:
    """Return a command's wall seconds. Raise RuntimeError with the end of its output on failure."""
    began = time.perf_counter()
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    seconds = time.perf_counter() - began
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stdout[-4000:]}")
    return seconds


def output_tokens(results: Path) -> int:
    return sum(json.loads(line)["response"]["body"]["usage"]["completion_tokens"] for line in results.open())


def _summary(runs: list[tuple[float, int]]) -> dict[str, Any]:
    seconds = [one for one, _ in runs]
    median = statistics.median(seconds)
    return {
        "seconds": [round(value, 2) for value in seconds],
        "median_seconds": round(median, 2),
        "output_tokens_per_second": round(runs[0][1] / median, 1),
    }


if __name__ == "__main__":
    main()
