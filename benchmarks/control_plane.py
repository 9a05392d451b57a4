"""The throughput of the queue and the control plane: API, RQ workers, ticker and their own Redis,
with a worker that answers at once (`null_worker`).

    python -m benchmarks.control_plane
    python -m benchmarks.control_plane --only batches behind --scale 0.1

Scenarios, each on a Redis that was just started:

- lines: one batch of 50,000 lines of 200 bytes through the API, from its creation to its end
- batches: 1,000 batches of 10 lines, created as fast as the API takes them
- behind: 10 lines behind 8 batches of 150,000 that run, of the same tenant and of another one
- open: 50,000 lines of 200 bytes appended to an open batch, 500 in a call, while they run
- file: 300,000 lines as `run-batch` has them
- large: 100,000 lines of 2,060 bytes as `run-batch` has them; the first is claimed at once
- million: 1,000,000 lines by `pipeline run-batch` itself, and the memory of every process
"""

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks.memory_samples import REDIS, MemorySamples
from benchmarks.null_worker import MODEL
from benchmarks.ports import free_port
from benchmarks.processes import ProcessorTime
from benchmarks.report import arguments, write_report
from jobs.batch.client import BatchSpec, create_batch
from jobs.protocol.states import END_STATES
from jobs.queue import keys
from jobs.queue.batch_fields import BatchFields
from jobs.queue.request_queue import Queue
from jobs.queue.settings import QueueSettings
from jobs.store.api_keys import create_key
from pipeline.supervisor import Supervisor

_ROLES = {
    "rq_worker": "rq workers",
    "control.ticker": "ticker",
    "pipeline api": "api",
    "null_worker": "null worker",
    "run-batch": "the command",
    "server": REDIS,
    "aof-rewrite": REDIS,
}
_LINE_BYTES = 200
_LARGE_LINE_BYTES = 2060
_APPENDED_LINES = 500  # in one call
_POLL_SECONDS = 0.02
_CREATORS = 4  # clients that create batches side by side
_BUSY_LINES = 100  # of each batch are finished before another one counts as behind it


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=SCENARIOS, default=list(SCENARIOS), help="these scenarios alone")
    parser.add_argument("--scale", type=float, default=1.0, help="lines, or batches, as a share of the full number")
    parser.add_argument("--claim", type=int, default=500, help="most requests of the worker's claims")
    parser.add_argument("--publish", action="store_true", help="publish each request's tokens before its result")
    parser.add_argument("--file-store", help="store of the scenarios that have an API, such as s3://BUCKET/NEW-PREFIX")
    args = parser.parse_args()
    worker = ["--claim", str(args.claim), *(["--publish"] if args.publish else [])]
    for name in args.only:
        with running_fleet(worker, args.file_store) as load:
            figures = SCENARIOS[name](load, args.scale)
        write_report(f"control-plane-{name}", {"scale": args.scale, **figures}, args.out, args.seed)


class BatchLoad:
    """The load on a running fleet, and its measurements."""

    def __init__(
        self, queue: Queue, redis_url: str, folder: Path, store: str, url: str, first_claims: dict[str, float]
    ) -> None:
        self.queue = queue
        self.redis_url = redis_url
        self.folder = folder
        self.first_claims = first_claims
        """By batch, unix seconds."""
        self.most_result_bytes = 0
        self._store = store
        self._url = url
        self._clients: dict[str, httpx.Client] = {}

    def client(self, tenant: str) -> httpx.Client:
        """Return a client with a key of the tenant."""
        if tenant not in self._clients:
            _, secret = create_key(self._store, tenant=tenant)
            headers = {"authorization": f"Bearer {secret}"}
            self._clients[tenant] = httpx.Client(base_url=self._url, headers=headers, timeout=120)
            time.sleep(1.1)  # the API looks for new keys once a second
        return self._clients[tenant]

    def upload(self, tenant: str, lines: int) -> str:
        """Return the id of a new input file."""
        with (
            tempfile.TemporaryDirectory() as scratch,
            write_lines(Path(scratch) / "input.jsonl", lines).open("rb") as content,
        ):
            answer = self.client(tenant).post("/v1/files", files={"file": content}, data={"purpose": "batch"})
        return str(answer.raise_for_status().json()["id"])

    def create(self, tenant: str, file: str) -> str:
        """Return the id of a new batch."""
        body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        return str(self.client(tenant).post("/v1/batches", json=body).raise_for_status().json()["id"])

    def wait_for_end(self, batch: str) -> BatchFields:
        """Wait for the end of a batch and return its record.

        Raise RuntimeError unless every line succeeded.
        """
        while (fields := self.queue.batch_fields(batch)).state not in END_STATES:
            self.most_result_bytes = max(self.most_result_bytes, fields.result_bytes)
            time.sleep(_POLL_SECONDS)
        if fields.state != "completed" or fields.failed:
            raise RuntimeError(f"batch {batch} ended as {fields.state} with {fields.failed} failed lines")
        return fields

    def redis_figures(self) -> dict[str, Any]:
        """Return the figures that the Redis server reports."""
        info: Any = self.queue.redis.info()
        return {
            "redis_peak_mb": round(info["used_memory_peak"] / 1e6, 1),
            "redis_commands": info["total_commands_processed"],
            "most_undrained_mb": round(self.most_result_bytes / 1e6, 1),
        }


@contextmanager
def running_fleet(worker: list[str], file_store: str | None = None) -> Iterator[BatchLoad]:
    """Run an API, a control plane, a Redis and a null worker; end them all."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        store, port = file_store or str(folder / "store"), free_port()
        settings = QueueSettings.from_environment(file_store=store)
        supervisor = stack.enter_context(Supervisor(None, settings, _say, "warning"))
        supervisor.start_jobs(store)
        supervisor.start_api(["--port", str(port), "--file-store", store, "--max-batch-lines", "1000000"])
        first_claims = stack.enter_context(_null_worker(supervisor.redis_url, worker))
        url = f"http://127.0.0.1:{port}"
        load = BatchLoad(supervisor.queue, supervisor.redis_url, folder, store, url, first_claims)
        while not (load.queue.models() and _answers(load)):
            time.sleep(_POLL_SECONDS)
        yield load


def one_batch_of_the_api(load: BatchLoad, scale: float) -> dict[str, Any]:
    lines = int(50_000 * scale)
    file = load.upload("first", lines)
    with _measured(lines) as processors:
        began = time.time()
        batch = load.create("first", file)
        fields = load.wait_for_end(batch)
    return {**_figures_of(load, fields, batch, began), **load.redis_figures(), **processors}


def one_open_batch(load: BatchLoad, scale: float) -> dict[str, Any]:
    lines, client = int(50_000 * scale), load.client("first")
    with tempfile.TemporaryDirectory() as scratch:
        content = write_lines(Path(scratch) / "input.jsonl", lines).read_bytes()
    body = {"input": "stream", "endpoint": "/v1/completions", "completion_window": "24h"}
    with _measured(lines) as processors:
        batch = str(client.post("/v1/batches", json=body).raise_for_status().json()["id"])
        began = time.time()
        for start in range(0, len(content), _APPENDED_LINES * _LINE_BYTES):
            part = content[start : start + _APPENDED_LINES * _LINE_BYTES]
            client.post(f"/v1/batches/{batch}/requests", content=part).raise_for_status()
        appended = time.time()
        client.post(f"/v1/batches/{batch}/close").raise_for_status()
        fields = load.wait_for_end(batch)
    return {
        "appended_lines_per_second": round(lines / (appended - began)),
        **_figures_of(load, fields, batch, began),
        **load.redis_figures(),
        **processors,
    }


def one_file_of_run_batch(
    load: BatchLoad, scale: float, lines: int = 300_000, line_bytes: int = _LINE_BYTES
) -> dict[str, Any]:
    lines = int(lines * scale)
    source = write_lines(load.folder / "input.jsonl", lines, line_bytes)
    root, output = load.folder / "out.parts", load.folder / "out.jsonl"
    spec = BatchSpec(input=str(source), root=str(root), output=str(output), error_file="inline", default_model=MODEL)
    with _measured(lines) as processors:
        began = time.time()
        batch = create_batch(load.queue.redis, spec).id
        fields = load.wait_for_end(batch)
    return {**_figures_of(load, fields, batch, began), **load.redis_figures(), **processors}


def one_million_lines(load: BatchLoad, scale: float) -> dict[str, Any]:
    lines = int(1_000_000 * scale)
    source, output = write_lines(load.folder / "input.jsonl", lines), load.folder / "out.jsonl"
    command = [sys.executable, "-m", "pipeline", "run-batch", str(source), "-o", str(output)]
    with _measured(lines) as processors:
        samples, began = MemorySamples(os.getpid(), _ROLES), time.monotonic()
        subprocess.run(command, env={**os.environ, "REDIS_URL": load.redis_url}, check=True, capture_output=True)
        seconds = time.monotonic() - began
        levels = samples.end()
    with output.open("rb") as answered:
        if (count := sum(1 for _ in answered)) != lines:
            raise RuntimeError(f"{count} of {lines} lines have an answer")
    figures = {"lines": lines, "seconds": round(seconds, 2), "lines_per_second": round(lines / seconds), "mb": levels}
    return {**figures, **load.redis_figures(), **processors}


def many_small_batches(load: BatchLoad, scale: float) -> dict[str, Any]:
    count, lines = int(1000 * scale), 10
    file = load.upload("first", lines)
    with _measured(count * lines) as processors, ThreadPoolExecutor(_CREATORS) as creators:
        began = time.time()
        batches = list(creators.map(lambda _: load.create("first", file), range(count)))
        created = time.time()
        while load.queue.redis.exists(keys.ACTIVE):
            time.sleep(_POLL_SECONDS)
        ended = time.time()
    spans = [_span(load.wait_for_end(batch)) for batch in batches]
    return {
        "batches": count,
        "seconds": round(ended - began, 2),
        "creating_seconds": round(created - began, 2),
        "median_batch_seconds": round(statistics.median(spans), 2),
        "worst_batch_seconds": round(max(spans), 2),
        **load.redis_figures(),
        **processors,
    }


def small_behind_large(load: BatchLoad, scale: float) -> dict[str, Any]:
    lines = int(150_000 * scale)
    large, small = load.upload("first", lines), {tenant: load.upload(tenant, 10) for tenant in ("first", "second")}
    busy = [load.create("first", large) for _ in range(8)]
    while min(load.queue.batch_fields(batch).finished for batch in busy) < _BUSY_LINES:
        time.sleep(_POLL_SECONDS)
    figures: dict[str, Any] = {"busy_lines": lines}
    for turn in range(2):
        for tenant, file in small.items():
            began = time.time()
            batch = load.create(tenant, file)
            fields = load.wait_for_end(batch)
            waited = {"first_claim": load.first_claims[batch], "completed": fields.timestamps["completed"]}
            name = f"{'same' if tenant == 'first' else 'other'}_tenant_{turn + 1}"
            figures[name] = {what: round(when - began, 2) for what, when in waited.items()}
    finished = [load.queue.batch_fields(batch).finished for batch in busy]
    return figures | {"saturated_to_the_end": max(finished) < lines}


SCENARIOS: dict[str, Callable[[BatchLoad, float], dict[str, Any]]] = {
    "lines": one_batch_of_the_api,
    "batches": many_small_batches,
    "behind": small_behind_large,
    "open": one_open_batch,
    "file": one_file_of_run_batch,
    "large": partial(one_file_of_run_batch, lines=100_000, line_bytes=_LARGE_LINE_BYTES),
    "million": one_million_lines,
}


def write_lines(path: Path, count: int, line_bytes: int = _LINE_BYTES) -> Path:
    """Write completions of `line_bytes` bytes each, with nothing in common."""
    with path.open("wb") as file:
        for line in range(count):
            start = (
                f'{{"custom_id":"line-{line}","method":"POST","url":"/v1/completions","body":{{"model":"{MODEL}",'
                f'"max_tokens":16,"prompt":"{line * 2654435761 % 2**32:08x} '
            ).encode()
            file.write(start.ljust(line_bytes - 4, b"x") + b'"}}\n')
    return path


@contextmanager
def _measured(lines: int) -> Iterator[dict[str, Any]]:
    """Measure each process's processor time per line; the figures are set at the end."""
    figures: dict[str, Any] = {}
    usage = ProcessorTime(os.getpid(), _ROLES)
    usage.begin()
    yield figures
    figures["processor_us_per_line"] = {role: round(1e6 * used / lines, 1) for role, used in usage.end().items()}


def _figures_of(load: BatchLoad, fields: BatchFields, batch: str, began: float) -> dict[str, Any]:
    times = fields.timestamps
    seconds = times["completed"] - began
    return {
        "lines": fields.total,
        "seconds": round(seconds, 2),
        "lines_per_second": round(fields.total / seconds),
        "validated": round(times["in_progress"] - began, 2),
        "first_claim": round(load.first_claims[batch] - began, 2),
        "finalizing": round(times["finalizing"] - began, 2),
    }


def _span(fields: BatchFields) -> float:
    return fields.timestamps["completed"] - fields.timestamps["created"]


@contextmanager
def _null_worker(redis_url: str, options: list[str]) -> Iterator[dict[str, float]]:
    """Run a worker; yield the times of the first claims by batch."""
    command = [sys.executable, "-m", "benchmarks.null_worker", "--redis-url", redis_url, *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = {}

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            batch, when = line.split()
            found[batch] = float(when)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield found
    finally:
        process.kill()
        process.wait()
        reader.join()


def _answers(load: BatchLoad) -> bool:
    try:
        return load.client("first").get("/v1/models").is_success
    except httpx.TransportError:
        return False


def _say(line: str) -> None:
    print(line, file=sys.stderr)


if __name__ == "__main__":
    main()
