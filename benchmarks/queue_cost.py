"""What Redis, JSON and the other processes cost: `run-batch` against the engine alone on the same
lines.

    python -m benchmarks.queue_cost --requests 1024

A turn is a whole `run-batch`, then a fresh engine that gets the same lines as token ids, in the
order of the plan that the run had made. Of the run counts the time from its worker's first claim to
its last commit, as the worker's own log has them; of the engine from the moment at which it has the
requests to the last token. Both are warm by then: a worker runs a request of its own before it
claims.
"""

import asyncio
import re
import subprocess
import tempfile
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.driving import run_pass, running_engine, tokenized
from benchmarks.models import SHAPES, model_folder
from benchmarks.processes import command_line, family, own_cpu_seconds
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
_LOOK_SECONDS = 0.2


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
            results = Path(scratch) / "results.jsonl"
            runs.append(observed(pipeline_run_batch(source, results, model, "--log-level", "debug")))
            assert output_tokens(results) == sum(request.sampling.max_tokens for request in requests)
            order = planned_lines(results)
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


def observed(command: list[str]) -> dict[str, Any]:
    """Run a `run-batch` that logs at level debug: seconds from first claim to last commit, and
    each part's processor time.
    """
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    usage = ProcessorTime(process.pid)
    assert process.stderr is not None
    lines, events = [], []
    for line in process.stderr:
        lines.append(line)
        if match := _LINE.match(line.rstrip()):
            events.append((_seconds(match), match[4]))
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


class ProcessorTime:
    """Processor time that each part of a run uses, looked at now and then, since its processes are
    gone at its end.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        # As first seen: a process that ends has no command line any more
        self._roles: dict[int, str] = {}
        self._used: dict[int, float] = {}
        self._before: dict[int, float] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """What was used until now does not count."""
        self._before = self._look()

    def end(self) -> dict[str, float]:
        """Return seconds by part."""
        self._ended.set()
        self._thread.join()
        by_role: dict[str, float] = defaultdict(float)
        for pid, seconds in self._used.items():
            by_role[self._roles[pid]] += seconds - self._before.get(pid, 0.0)
        return {role: round(seconds, 2) for role, seconds in sorted(by_role.items())}

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_SECONDS):
            self._used |= self._look()

    def _look(self) -> dict[int, float]:
        used = {pid: own_cpu_seconds(pid) for pid in family(self._pid)}
        for pid in used.keys() - self._roles.keys():
            self._roles[pid] = self._role(pid)
        return {pid: seconds for pid, seconds in used.items() if seconds}

    def _role(self, pid: int) -> str:
        words = command_line(pid)
        return (
            "the command"
            if pid == self._pid
            else next((role for part, role in _ROLES.items() if part in words), "other")
        )


def planned_lines(results: Path) -> list[int]:
    """Return the order in which a finished run took its lines, counted from 1, from the plan beside
    its output.
    """
    with results.with_name(f"{results.name}.parts").joinpath(PLAN_NAME).open("rb") as plan:
        return [entry.line for entry in read_plan(plan, 0, 1 << 30)]


async def _engine_alone(model: str, requests: list[EngineRequest]) -> dict[str, Any]:
    async with running_engine(model) as engine:
        return (await run_pass(engine, requests)).figures()


def _seconds(match: re.Match[str]) -> float:
    return 3600 * int(match[1]) + 60 * int(match[2]) + float(match[3])


if __name__ == "__main__":
    main()
