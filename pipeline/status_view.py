"""Tables of `pipeline status`."""

import time
from collections import Counter

from rich.table import Table

from jobs.protocol.states import END_STATES, STATES
from jobs.queue.gauges import GpuGauges
from jobs.queue.on_demand import OnDemandModel
from jobs.queue.registry import WorkerState
from jobs.queue.request_queue import Queue
from pipeline.progress import duration
from pipeline.tables import new_table


def workers_table(queue: Queue) -> Table:
    """Return one row for each live worker."""
    table = new_table("Workers", "id", "state", "models", "context", "host", "pid", "up", "tokens/s", "GPU")
    workers = queue.workers()
    gauges = queue.gauges([worker.id for worker in workers])
    for worker in workers:
        context = str(worker.max_model_len) if worker.max_model_len else ""
        up = duration(max(0.0, time.time() - worker.started))
        reported = gauges.get(worker.id)
        lately = [f"{reported.tokens_per_second:.0f}", "\n".join(map(_gpu, reported.gpus))] if reported else ["", ""]
        table.add_row(
            worker.id, worker.state, ", ".join(worker.models), context, worker.host, str(worker.pid), up, *lately
        )
    return table


def models_table(queue: Queue) -> Table:
    """Return one row for each model that is or was served, or is loaded on demand."""
    workers = sorted(queue.workers(), key=lambda worker: worker.state == "ready")  # ready last: it overrides others
    states = {name: worker.state for worker in workers for name in worker.models}
    offers, known = queue.on_demand(), {model.name: model for model in queue.models()}
    table = new_table("Models", "name", "context", "served now", "endpoints")
    for name in sorted({*known, *offers}):
        context, urls = (str(known[name].max_model_len), known[name].endpoints) if name in known else ("", [])
        table.add_row(name, context, _served_now(states.get(name), offers.get(name)), ", ".join(urls))
    return table


def _served_now(state: WorkerState | None, offer: OnDemandModel | None) -> str:
    """Return whether a model is loaded, or is loaded on demand, from its worker's state."""
    if state == "ready":
        return "yes"
    if offer is None:
        return "no"
    if state in ("loading", "initializing") and not offer.refusal:  # else a killed worker left the state
        return "loading"
    trouble = offer.failure or offer.problem
    return f"on demand, but {trouble}" if trouble else "on demand"


def batches_tables(queue: Queue) -> list[Table]:
    """Return a table of the batches that have not ended, and the number in each end state."""
    states = queue.states()
    table = new_table("Batches", "id", "state", "total", "completed", "failed", "waiting")
    for batch, status in queue.statuses([batch for batch, state in states.items() if state not in END_STATES]).items():
        counts = (status.total, status.completed, status.failed, status.total - status.finished)
        table.add_row(batch, status.state, *map(str, counts))
    counted = Counter(states.values())
    ended = new_table("Ended batches", *(end for end in STATES if end in END_STATES))
    ended.add_row(*(str(counted[end]) for end in STATES if end in END_STATES))
    return [table, ended]


def tokens_table(queue: Queue) -> Table:
    """Return the totals of output tokens; a worker's newest tokens count once published."""
    totals, in_flight = queue.token_totals(), queue.tokens_in_flight()
    # The two are read one after the other; tokens generated in between would make it negative.
    again = max(0, totals.generated - totals.delivered - in_flight)
    share = f"{again} ({again / totals.generated:.1%})" if totals.generated else "0"
    table = new_table("Output tokens", "generated", "delivered", "in flight", "computed again or cancelled")
    table.add_row(str(totals.generated), str(totals.delivered), str(in_flight), share)
    return table


def _gpu(gpu: GpuGauges) -> str:
    """Return a GPU's name, utilization, memory and power, as far as they are known."""
    parts = [gpu.name]
    if gpu.busy is not None:
        parts.append(f"{gpu.busy:.0%} busy")
    if gpu.memory_used is not None and gpu.memory_total is not None:
        parts.append(f"{gpu.memory_used / 2**30:.0f} of {gpu.memory_total / 2**30:.0f} GiB")
    if gpu.watts is not None:
        parts.append(f"{gpu.watts:.0f} W")
    return ", ".join(parts)
