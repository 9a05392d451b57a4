"""The cost of Redis, JSON and the other processes: `run-batch` against the engine alone on the same
lines.

    python -m benchmarks.queue_cost --requests 1024

A turn is a whole `run-batch`, then a new engine that gets the same lines as token ids, in the order
of the run's plan. The time of the run is from the worker's first claim to its last commit, from the
worker's log. The time of the engine is from the submission of the requests to the last token. Both
are warm by then: a worker runs a request of its own before it claims.
"""

import asyncio
import re
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.driving import run_pass, running_engine, tokenized
from benchmarks.models import SHAPES, model_folder
from benchmarks.processes import ProcessorTime
from benchmarks.report import arguments, by_turns, write_report
from benchmarks.run_batch import output_tokens, pipeline_run_batch
from benchmarks.workload import write_workload
from jobs.batch.plan import PLAN_NAME, read_plan
from workers.engine.messages.core import EngineRequest

_LINE = re.compile(r"(\d+):(\d+):(\d+\.\d+) worker DEBUG (claimed \d+ requests|committed \d+ results)$")
_ROLES = {
    "core_process": "engine core",
    "pipeline worker": "worker process",
    "jobs.": "control plane",
    "server": "Redis",
}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", choices=SHAPES, default="gpt2-124m")
    parser.add_argument("--kind", choices=("random", "shared"), default="shared")
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        source = write_workload(Path(scratch) / "input.jsonl", args.kind, args.requests, args.model, args.seed)
        figures = measure(source, args.model, args.turns)
    write_report(f"queue-cost-{args.model}-{args.kind}-{args.requests}", figures, args.out, args.seed)


def measure(source: Path, model: str, turns: int) -> dict[str, Any]:
    model_folder(model)
    requests = tokenized(source, model)
    runs: list[dict[str, Any]] = []
    alone: list[dict[str, Any]] = []
    for _ in range(turns):
        with tempfile.TemporaryDirectory() as scratch:
            results, plan = Path(scratch) / "results.jsonl", PlanReader(Path(scratch) / "results.jsonl.parts")
            runs.append(observed(pipeline_run_batch(source, results, model, "--log-level", "debug"), plan.read))
            assert output_tokens(results) == sum(request.sampling.max_tokens for request in requests)
            order = plan.lines
            assert len(order) == len(requests)
        alone.append(asyncio.run(_engine_alone(model, [requests[line - 1] for line in order])))
    return {
        "run_batch_seconds": [round(run["seconds"], 2) for run in runs],
        "engine_seconds": [engine["seconds"] for engine in alone],
        "engine_computed_tokens": [engine["computed_tokens"] for engine in alone],
        **by_turns([run["seconds"] for run in runs], [engine["seconds"] for engine in alone]),
        "engine_steps": alone[-1]["steps"],
        "claims": runs[-1]["claims"],
        "commits": runs[-1]["commits"],
        "processor_seconds": runs[-1]["processor_seconds"],
    }


def observed(command: list[str], on_event: Callable[[], None]) -> dict[str, Any]:
    """Run a `run-batch` command that logs at level debug; call `on_event` at each claim and commit.

    Return the seconds from first claim to last commit, and each part's processor time.
    """
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    usage = ProcessorTime(process.pid, _ROLES)
    assert process.stderr is not None
    lines, events = [], []
    for line in process.stderr:
        lines.append(line)
        if match := _LINE.match(line.rstrip()):
            events.append((_seconds(match), match[4]))
            on_event()
            if len(events) == 1:
                usage.begin()
    processor_seconds = usage.end()
    if process.wait():
        raise RuntimeError(f"{' '.join(command)} ended with status {process.returncode}:\n{''.join(lines)[-4000:]}")
    claims, commits = ([when for when, what in events if what.startswith(word)] for word in ("claimed", "committed"))
    return {
        "seconds": (commits[-1] - claims[0]) % 86_400,
        "claims": len(claims),
        "commits": len(commits),
        "processor_seconds": processor_seconds,
    }


class PlanReader:
    """Reads the plan of a run while it runs: its folder goes with its end.

    `lines` are the input's line numbers, from 1, in the order of the plan.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.lines: list[int] = []

    def read(self) -> None:
        """Read the plan as far as it is there."""
        with suppress(FileNotFoundError), (self._folder / PLAN_NAME).open("rb") as plan:
            self.lines = [entry.line for entry in read_plan(plan, 0, 1 << 30)]


async def _engine_alone(model: str, requests: list[EngineRequest]) -> dict[str, Any]:
    async with running_engine(model) as engine:
        return (await run_pass(engine, requests)).figures()


def _seconds(match: re.Match[str]) -> float:
    return 3600 * int(match[1]) + 60 * int(match[2]) + float(match[3])


if __name__ == "__main__":
    main()
