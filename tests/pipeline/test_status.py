"""What `pipeline status` shows."""

import time

from rich.console import Console

from jobs.queue.gauges import GpuGauges, WorkerGauges
from jobs.queue.registry import WorkerRecord
from jobs.queue.request_queue import Queue
from pipeline.status_view import workers_table


def test_workers_are_shown_with_what_they_do_and_what_their_gpus_report(queue: Queue) -> None:
    for name in ("busy", "silent"):
        queue.register_worker(WorkerRecord(name, ["m"], "ready", 128, time.time(), "host", 1))
    gpus = [GpuGauges("NVIDIA H200", "GPU-1", 0.5, 60 << 30, 140 << 30, 400.4), GpuGauges("MIG slice", "GPU-2")]
    queue.report_gauges("busy", WorkerGauges(1, 0, 5, 10, 100, 1234.5, gpus))
    console = Console(width=200, record=True)
    console.print(workers_table(queue))
    busy, more, silent = (line for line in console.export_text().splitlines() if "│" in line)
    assert "1234" in busy
    assert "NVIDIA H200, 50% busy, 60 of 140 GiB, 400 W" in busy
    assert "MIG slice" in more
    assert "ready" in silent
