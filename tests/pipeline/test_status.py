"""What `pipeline status` shows."""

import time

import redis
from rich.console import Console

from jobs.protocol.states import END_STATES
from jobs.queue.gauges import GpuGauges, WorkerGauges
from jobs.queue.on_demand import OnDemandModel
from jobs.queue.registry import WorkerRecord
from jobs.queue.request_queue import Queue
from pipeline.status_view import batches_tables, models_table, workers_table

OFFER = OnDemandModel("server")


def test_workers_are_shown_with_what_they_do_and_what_their_gpus_report(queue: Queue) -> None:
    for name in ("busy", "silent"):
        queue.register_worker(WorkerRecord(name, ["m"], "ready", 128, time.time(), "host", 1))
    gpus = [GpuGauges("NVIDIA H200", "GPU-1", 0.5, 60 << 30, 140 << 30, 400.4), GpuGauges("MIG slice", "GPU-2")]
    queue.report_gauges("busy", WorkerGauges(1, 0, 1234.5, gpus))
    console = Console(width=200, record=True)
    console.print(workers_table(queue))
    busy, more, silent = (line for line in console.export_text().splitlines() if "│" in line)
    assert "1234" in busy
    assert "NVIDIA H200, 50% busy, 60 of 140 GiB, 400 W" in busy
    assert "MIG slice" in more
    assert "ready" in silent


def test_batches_at_work_are_shown_and_ended_ones_counted_in_a_few_round_trips(
    queue: Queue, redis_client: redis.Redis
) -> None:
    for number in range(300):
        queue.create_batch(f"batch_{number}", 3, state=sorted(END_STATES)[number % 3])
    queue.create_batch("batch_open", 7, state="in_progress", fields={"completed": 2, "failed": 1})
    redis_client.config_resetstat()
    console = Console(width=200, record=True)
    console.print(*batches_tables(queue))
    reads, commands = redis_client.info("stats")["total_reads_processed"], redis_client.info("commandstats")
    assert reads < 20
    assert commands["cmdstat_hmget"]["calls"] == 1
    assert "cmdstat_hgetall" not in commands
    shown = [line.replace("│", " ").split() for line in console.export_text().splitlines() if "│" in line]
    assert shown == [["batch_open", "in_progress", "7", "2", "1", "4"], ["100", "0", "100", "100"]]


def test_models_are_shown_with_whether_they_are_loaded(queue: Queue) -> None:
    for name, state in (("ready", "ready"), ("loads", "loading"), ("big", "loading"), ("was-served", "ready")):
        queue.register_worker(WorkerRecord(name, [name], state, 128, time.time(), "host", 1))  # type: ignore[arg-type]
    queue.remove_worker("was-served")
    big = OnDemandModel("server", "needs about 9.00 GiB of memory, and 1.00 GiB are available", refusal="memory")
    queue.offer({"ready": OFFER, "loads": OFFER, "asleep": OFFER, "big": big}, [])
    console = Console(width=200, record=True)
    console.print(models_table(queue))
    rows = [[cell.strip() for cell in line.split("│")] for line in console.export_text().splitlines() if "│" in line]
    assert {row[1]: row[3] for row in rows} == {
        "asleep": "on demand",
        "big": f"on demand, but {big.problem}",
        "loads": "loading",
        "ready": "yes",
        "was-served": "no",
    }
