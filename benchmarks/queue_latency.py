"""The latency added between the engine and a client: worker process, Redis, API and HTTP.

    python -m benchmarks.queue_latency
    python -m benchmarks.queue_latency --only paced --streams 1000 --tokens 100

The added latency of a token is the time from its output by the engine core to the arrival of its
event at the client's socket, on the machine's monotonic clock. Scenarios:

- paced: a core without a model gives each stream a token every `--pace-ms`, so that the way alone
  is measured;
- engine: the engine with a real shape, whose compute threads share the cores with all that; then
  the same requests on the engine alone;
- leaving: four calls for each slot of the core, half of them streams, so that some wait in the
  queue. All clients leave at once. The figures are the times until the core has the orders to end
  their requests, and until the queue is empty.

The first tokens of a stream count only once all streams have begun; processor time is per output
token, of each process.
"""

import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from benchmarks.control_plane import free_port
from benchmarks.driving import CONTEXT, greedy, run_pass, running_engine
from benchmarks.models import SHAPES, model_folder
from benchmarks.processes import family, memory, own_cpu_seconds
from benchmarks.report import arguments, write_report
from benchmarks.stamped_core import PACE, STAMPS, Aborted, Added, Note, Step, read_stamps
from benchmarks.stream_client import FIRST_PROMPT_TOKEN, request
from jobs.queue import keys
from jobs.queue.connection import connect
from jobs.queue.request_queue import Queue
from pipeline.kept_server import KeptServer
from workers.text.tokenizer import TextTokenizer

_SCENARIOS = ("paced", "engine", "leaving")
_PATIENCE_SECONDS, _LOOK_SECONDS = 120.0, 0.01


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=_SCENARIOS, default=_SCENARIOS, help="these scenarios alone")
    parser.add_argument("--model", choices=SHAPES, default="gpt2-124m")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200, help="of each answer")
    parser.add_argument("--pace-ms", type=float, default=50.0, help="of the paced core's steps")
    args = parser.parse_args()
    model_folder(args.model)
    for name in args.only:
        if name == "leaving":
            figures = leaving(args.model, args.streams, args.pace_ms)
            write_report(f"queue-latency-leaving-{args.streams}", figures, args.out)
            continue
        pace = args.pace_ms if name == "paced" else None
        figures = measure(args.model, args.streams, args.tokens, pace)
        if pace is None:
            figures |= engine_alone(args.model, args.streams, args.tokens, figures["tokens_per_second"])
        write_report(f"queue-latency-{name}-{args.streams}", figures, args.out)


@dataclass(frozen=True, slots=True)
class MeasuredFleet:
    """A worker, Redis and an API, by their process ids."""

    url: str
    redis_url: str
    pids: dict[str, int]

    def processor_seconds(self) -> dict[str, float]:
        return {name: own_cpu_seconds(pid) for name, pid in self.pids.items()}


def measure(model: str, streams: int, tokens: int, pace_ms: float | None) -> dict[str, Any]:
    """Run `streams` answers through all processes; return latency, throughput and CPU time."""
    with tempfile.TemporaryDirectory() as scratch:
        stamps = Path(scratch) / "stamps"
        with running_fleet(Path(scratch), model, streams, stamps, pace_ms) as fleet:
            before = fleet.processor_seconds()
            report = _client(fleet.url, model, streams, tokens)
            used = {name: seconds - before[name] for name, seconds in fleet.processor_seconds().items()}
            api_peak = memory(fleet.pids["api"])["peak"]
        lost = [one for one in report["streams"] if not one["done"] or one["reason"] != "length"]
        added = added_latency(model, read_stamps(stamps), report["streams"])
    used["client"] = report["processor_seconds"]
    began = min(one["asked"] for one in report["streams"])
    ended = max(one["arrivals"][-1][0] for one in report["streams"] if one["arrivals"])
    return {
        "streams": streams,
        "lost_streams": len(lost),
        "pace_ms": pace_ms,
        "added_ms": percentiles(added),
        "tokens_per_second": round(streams * tokens / (ended - began), 1),
        "processor_us_per_token": {name: round(1e6 * one / (streams * tokens), 1) for name, one in used.items()},
        "api_peak_mb": round(api_peak / 1e6),
    }


@contextmanager
def running_fleet(
    folder: Path, model: str, streams: int, stamps: Path, pace_ms: float | None
) -> Iterator[MeasuredFleet]:
    """Run a worker with slots for `streams` streams, with its own Redis and API."""
    pace = {} if pace_ms is None else {PACE: str(pace_ms)}
    slots = ["--max-num-seqs", str(streams)]
    with ExitStack() as stack:
        server = stack.enter_context(KeptServer(folder / "redis", lambda line: print(line, file=sys.stderr)))
        redis, port = ["--redis-url", server.url, "--log-level", "warning"], free_port()
        # Clients use the name of the model, not its folder
        worker = ["benchmarks.stamped_worker", str(model_folder(model)), "--served-model-name", model]
        limits = ["--max-model-len", str(CONTEXT), *slots]
        worker_pid = stack.enter_context(_child([*worker, *limits, *redis], {STAMPS: str(stamps), **pace}))
        api = ["pipeline", "api", "--port", str(port), "--file-store", str(folder / "store"), *redis]
        api_pid = stack.enter_context(_child(api, {}))
        url = f"http://127.0.0.1:{port}"
        _wait_until_ready(url)
        core = next(pid for pid in family(worker_pid) if pid != worker_pid)
        yield MeasuredFleet(
            url, server.url, {"worker": worker_pid, "core": core, "redis": _redis_pid(server.url), "api": api_pid}
        )


def leaving(model: str, clients: int, pace_ms: float) -> dict[str, Any]:
    """Return the time from the clients' departure until their last calls were gone.

    Running calls leave the core, waiting calls leave the queue.
    """
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        stamps = Path(scratch) / "stamps"
        fleet = stack.enter_context(running_fleet(Path(scratch), model, clients // 4, stamps, pace_ms))
        queue = Queue(stack.enter_context(connect(fleet.redis_url)))
        connections = [_call(fleet.url, model, number) for number in range(clients)]
        _wait(lambda: len(_added(stamps)) >= clients // 4 and queue.redis.hlen(keys.LIVE_CALLS) == clients)
        began = time.monotonic()
        for connection in connections:
            connection.close()
        _wait(lambda: not queue.redis.hlen(keys.LIVE_CALLS))
        waiting = time.monotonic() - began
        _wait(lambda: _added(stamps) <= {one for note in _aborted(stamps) for one in note.request_ids})
        running = max(note.at for note in _aborted(stamps)) - began
    return {"clients": clients, "running_ms": round(1000 * running, 1), "waiting_ms": round(1000 * waiting, 1)}


def _call(url: str, model: str, number: int) -> socket.socket:
    address = urlsplit(url)
    connection = socket.create_connection((address.hostname, address.port))
    connection.sendall(request(address.netloc, model, number, CONTEXT // 2, stream=bool(number % 2)))
    return connection


def _added(stamps: Path) -> set[int]:
    """Return the requests that the core received, without the worker's own."""
    notes = read_stamps(stamps) if stamps.exists() else []
    return {note.request_id for note in notes if isinstance(note, Added) and note.prompt[0] >= FIRST_PROMPT_TOKEN}


def _aborted(stamps: Path) -> list[Aborted]:
    return [note for note in read_stamps(stamps) if isinstance(note, Aborted)]


def added_latency(model: str, notes: list[Note], streams: list[dict[str, Any]]) -> list[float]:
    """Return each token's seconds from the core to the client, after all streams have begun."""
    tokenizer = TextTokenizer.load(str(model_folder(model)))
    emitted: dict[int, list[tuple[float, int]]] = {number: [] for number in range(len(streams))}
    prompts = {note.request_id: note.prompt for note in notes if isinstance(note, Added)}
    for step in (note for note in notes if isinstance(note, Step)):
        position = 0
        for request_id, count in zip(step.request_ids, step.counts, strict=True):
            number = prompts[request_id][0] - FIRST_PROMPT_TOKEN
            if number in emitted:
                emitted[number] += [(step.at, token) for token in step.token_ids[position : position + count]]
            position += count
    begin = max((tokens[0][0] for tokens in emitted.values() if tokens), default=0.0)
    added: list[float] = []
    for number, stream in enumerate(streams):
        detokenizer = tokenizer.detokenizer([])
        characters, place = 0, 0
        for at, token in emitted[number]:
            text = len(detokenizer.feed([token]))
            characters += text
            while place < len(stream["arrivals"]) and stream["arrivals"][place][1] < characters:
                place += 1
            # A token without text arrives with the next token that has text
            if text and at > begin and place < len(stream["arrivals"]):
                added.append(stream["arrivals"][place][0] - at)
    return added


def engine_alone(model: str, streams: int, tokens: int, through_everything: float) -> dict[str, Any]:
    """Run the same requests on the engine alone; compare its rate to `through_everything`."""

    async def run() -> float:
        async with running_engine(model) as engine:
            prompts = [[FIRST_PROMPT_TOKEN + number] * 32 for number in range(streams)]
            requests = [greedy(prompt, tokens, number) for number, prompt in enumerate(prompts)]
            return (await run_pass(engine, requests)).tokens_per_second

    alone = asyncio.run(run())
    return {"engine_alone_tokens_per_second": round(alone, 1), "ratio": round(through_everything / alone, 3)}


@contextmanager
def _child(words: list[str], environment: dict[str, str]) -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-m", *words], env={**os.environ, **environment})
    try:
        yield process.pid
    finally:
        process.terminate()
        process.wait()


def _client(url: str, model: str, streams: int, tokens: int) -> dict[str, Any]:
    words = ["--url", url, "--model", model, "--streams", str(streams), "--tokens", str(tokens)]
    command = [sys.executable, "-m", "benchmarks.stream_client", *words]
    report: dict[str, Any] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return report


def _wait_until_ready(url: str) -> None:
    def ready() -> bool:
        try:
            return httpx.get(f"{url}/ready").is_success
        except httpx.TransportError:
            return False

    _wait(ready)


def _wait(reached: Callable[[], bool]) -> None:
    """Wait until `reached()`. Raise RuntimeError if that takes too long."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not reached():
        if time.monotonic() > deadline:
            raise RuntimeError(f"the awaited state of the benchmark was not reached in {_PATIENCE_SECONDS:g} s")
        time.sleep(_LOOK_SECONDS)


def _redis_pid(url: str) -> int:
    with connect(url) as client:
        info: Any = client.info()
        return int(info["process_id"])


def percentiles(seconds: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(seconds, n=1000)
    figures = {"p50": cuts[499], "p90": cuts[899], "p99": cuts[989], "max": max(seconds)}
    return {name: round(1000 * value, 2) for name, value in figures.items()}


if __name__ == "__main__":
    main()
