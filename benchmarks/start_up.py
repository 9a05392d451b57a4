"""From the command to the first token, with a warm disk: `run-batch` on one line of one token,
until its result is in Redis.

    python -m benchmarks.start_up

The time of the whole command, which then writes the file of results and ends every process, is
reported beside it, and so is the engine's alone.
"""

import asyncio
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.driving import CONTEXT
from benchmarks.models import SHAPES, model_folder
from benchmarks.report import arguments, write_report
from benchmarks.run_batch import pipeline_run_batch
from benchmarks.workload import write_workload
from workers.engine.client.async_engine import AsyncEngine
from workers.engine.messages.config import EngineConfig
from workers.engine.messages.core import EngineRequest, SamplingParams


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", choices=SHAPES, default="gpt2-124m")
    parser.add_argument("--turns", type=int, default=5, help="after one that warms the disk up; the median counts")
    args = parser.parse_args()
    model_folder(args.model)
    write_report(f"start-up-{args.model}", measure(args.model, args.turns), args.out)


def measure(model: str, turns: int) -> dict[str, Any]:
    runs = [command_seconds(model) for _ in range(turns + 1)][1:]
    engine = [asyncio.run(engine_seconds(model)) for _ in range(turns)]
    first = [one for one, _ in runs]
    return {
        "first_token_seconds": [round(value, 2) for value in first],
        "median_seconds": round(statistics.median(first), 2),
        "whole_command_seconds": round(statistics.median(whole for _, whole in runs), 2),
        "engine_alone_seconds": round(statistics.median(engine), 2),
    }


def command_seconds(model: str) -> tuple[float, float]:
    """Return the seconds to the first result in Redis, and to the end of the command.

    Raises RuntimeError with the end of the command's output if it fails.
    """
    with tempfile.TemporaryDirectory() as scratch:
        source = write_workload(Path(scratch) / "input.jsonl", "random", 1, model, tokens=(1, 1))
        command = pipeline_run_batch(source, Path(scratch) / "results.jsonl", model, "--log-level", "debug")
        began, first, lines = time.perf_counter(), 0.0, []
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if not first and "worker DEBUG committed" in line:
                first = time.perf_counter() - began
        if process.wait() or not first:
            raise RuntimeError(f"{' '.join(command)} ended with status {process.returncode}:\n{''.join(lines)[-4000:]}")
        return first, time.perf_counter() - began


async def engine_seconds(model: str) -> float:
    """Return the seconds from an engine's start to its first token.

    This process has imported the engine's client before.
    """
    began = time.perf_counter()
    engine = AsyncEngine(EngineConfig(model=str(model_folder(model)), max_model_len=CONTEXT))
    await engine.start()
    try:
        sampling = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
        engine.add([EngineRequest(0, [1] * 16, [], sampling)])
        async for _ in engine.steps():
            return time.perf_counter() - began
    finally:
        await engine.stop()
    raise RuntimeError("the engine gave no token")


if __name__ == "__main__":
    main()
