"""What a run must have kept: `judge` looks at every line, call, process and key, and says what is
wrong.
"""

import json
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from jobs.store.storage import read_bytes
from tests.chaos.killers import Killers
from tests.chaos.load import ChaosLoad, SubmittedBatch
from tests.chaos.questions import text_of
from tests.pipeline.results import message_of
from tests.support.fleet import LocalFleet
from tests.support.integrity import faults
from tests.support.leftovers import leftovers
from tests.support.processes import command_line, descendants

_RQ_SECONDS = 200.0  # RQ looks each minute for jobs popped and never begun, and removes what it saw a minute ago


@dataclass
class Verdict:
    """The outcome of a run; without faults every promise was kept."""

    seed: int
    seconds: float
    lines: int
    load: ChaosLoad
    killers: Killers
    exits: dict[str, list[int]]
    tokens: tuple[int, int]  # generated, delivered
    faults: list[str] = field(default_factory=list)

    def report(self) -> str:
        """A table for people."""
        generated, delivered = self.tokens
        live = self.load.live
        calls = (
            f"{live.right}, of them {live.resumed} read on after a cut; {live.again} called again, {live.left} hung up"
        )
        cancelled = sum(batch.record is not None and batch.record.state == "cancelled" for batch in self.load.batches)
        rows = [("what was done", "times"), *((name, str(times)) for name, times in sorted(self.killers.done.items()))]
        rows += [
            ("", ""),
            ("seconds", f"{self.seconds:.0f}"),
            ("lines, in batches", f"{self.lines}, {len(self.load.batches)}, of them {cancelled} cancelled"),
            ("lines per second", f"{self.lines / self.seconds:.1f}"),
            ("live calls answered", calls),
            ("processes started again", str(sum(map(len, self.exits.values())))),
            ("tokens generated, delivered", f"{generated}, {delivered}"),
            ("computed again, or cancelled", f"{(generated - delivered) / max(1, generated):.1%}"),
            ("in no counter", "what each killed worker had generated since it last published"),
        ]
        width = max(len(name) for name, _ in rows)
        table = "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
        refused = "".join(f"\nrefused: {count} x {name}" for name, count in live.refusals.items())
        end = (
            "\n".join(self.faults)
            if self.faults
            else "nothing missing, nothing twice, every answer right, nothing left over"
        )
        return f"{table}{refused}\n{len(self.faults)} faults (seed {self.seed})\n{end}"


def judge(
    fleet: LocalFleet, load: ChaosLoad, killers: Killers, seconds: float, seed: int, requests: int, others: set[int]
) -> Verdict:
    """Stops the fleet, which has nothing to do any more, and looks at all that it leaves.

    `others`: processes that are none of its.
    """
    found = [*load.faults, *load.live.wrong]
    for batch in load.batches:
        found += _batch_faults(batch)
    found += _blocks_in_use(fleet)
    exits = fleet.exits
    codes = fleet.stop("api", "worker")
    # While the control plane still clears away what stopped workers leave
    found += leftovers(fleet.client, _RQ_SECONDS, fleet.clock_lead)
    codes |= fleet.stop("jobs")
    found += [f"{name} ended with exit code {code} when it was ordered to stop" for name, code in codes.items() if code]
    found += [
        f"{name} wrote a traceback:\n{_from_traceback(member.log)}"
        for name, member in fleet.members.items()
        if "Traceback" in member.log
    ]
    found += [f"left running: {command_line(pid)}" for pid in _left_running({*others, *fleet.servers})]
    found += faults(fleet.client)
    found += killers.store_faults()
    found += [f"only {load.finished} of {requests} lines were answered in time"] if load.finished < requests else []
    found += [] if load.live.right else ["no live call was answered"]
    generated, delivered = load.token_totals()
    return Verdict(seed, seconds, load.handed_in, load, killers, exits, (generated, delivered), found)


def _from_traceback(log: str, before: int = 500, after: int = 8000) -> str:
    """Return what surrounds a log's first traceback: characters `before` and `after` its begin."""
    begin = log.index("Traceback")
    return log[max(0, begin - before) : begin + after]


def _blocks_in_use(fleet: LocalFleet, patience: float = 30.0) -> list[str]:
    """Return sentences about idle engines that keep blocks; the null block is never free."""
    deadline = time.monotonic() + patience
    while True:
        gauges = fleet.queue.gauges([worker.id for worker in fleet.queue.workers() if worker.state == "ready"])
        found = [
            f"{worker} has {one.free_blocks} free blocks of {one.num_blocks}, and {one.running} requests"
            for worker, one in gauges.items()
            if one.running or one.free_blocks != one.num_blocks - 1
        ]
        if len(gauges) >= len(fleet.workers) and not found:
            return []
        if time.monotonic() > deadline:
            return [*found, f"{len(gauges)} of {len(fleet.workers)} workers report"]
        time.sleep(0.1)


def _left_running(others: set[int], patience: float = 30.0) -> set[int]:
    """Descendants of this process that do not end, but for the others."""
    deadline = time.monotonic() + patience
    while (left := set(descendants(os.getpid())) - others) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def _batch_faults(batch: SubmittedBatch) -> list[str]:
    """Every line once, in the output or among the errors, the output's in order and right; nothing
    but cancelling makes errors.
    """
    name, record = batch.source.parent.name, batch.record
    if _is_given_up(batch):
        return []
    ends = ("completed",) if batch.cancel_at is None else ("completed", "cancelled")
    if record is None or record.state not in ends:
        return [f"{name}: {record}"]
    found = []
    if not record.completed + record.failed == record.total == len(batch.questions):
        found.append(
            f"{name}: {record.completed} completed and {record.failed} failed of {record.total}, not"
            f" {len(batch.questions)}"
        )
    answered, failed = (_results(location) for location in (record.output, record.error_output))
    counts = Counter(result["custom_id"] for result in [*answered, *failed])
    found += [
        f"{name}: {custom_id} is there {counts[custom_id]} times"
        for custom_id in {*counts, *batch.questions}
        if counts[custom_id] != 1
    ]
    if (len(answered), len(failed)) != (record.completed, record.failed):
        found.append(
            f"{name}: {len(answered)} answers and {len(failed)} errors, counted {record.completed} and {record.failed}"
        )
    if [result["custom_id"] for result in answered] != [
        custom_id for custom_id in batch.questions if custom_id in _ids(answered)
    ]:
        found.append(f"{name}: the answers are out of order")
    for result in answered:
        question, text = batch.questions.get(result["custom_id"]), _answer_of(result)
        if question is None or not question.fits(text):
            found.append(f"{name}: {result['custom_id']} is answered {text!r}")
    for result in failed:
        if record.state != "cancelled" or result["error"]["code"] != "batch_cancelled":
            found.append(f"{name}: {result['custom_id']} failed: {str(result)[:300]}")
    return found


def _results(location: str | None) -> list[dict[str, Any]]:
    return [] if location is None else [json.loads(line) for line in read_bytes(location).splitlines()]


def _is_given_up(batch: SubmittedBatch) -> bool:
    """Return whether the batch's folder was removed, and it ended for that reason."""
    errors = [] if batch.record is None else [error.code for error in batch.record.errors]
    return batch.gone or (batch.lost and errors == ["batch_lost"])


def _answer_of(result: dict[str, Any]) -> str:
    """Return what a question is to judge."""
    numbers = result["response"]["body"].get("data")
    return text_of(message_of(result)) if numbers is None else json.dumps([item["embedding"] for item in numbers])


def _ids(results: list[dict[str, Any]]) -> set[str]:
    return {result["custom_id"] for result in results}
