"""How long a tenant's live call waits for its first token behind the calls of another tenant, and
what its calls cost that one.

    python -m benchmarks.tenants

One tenant holds 64 streams, then 300, then one call of n = 64; meanwhile the other sends calls of 4
tokens one after the other. `alone` is the same without the first tenant. The cost to the first
tenant is `beside_share`, its rate of tokens beside the calls as a share of its rate before them,
and the tokens that its preempted requests computed again.
"""

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from subprocess import Popen
from typing import Any

import httpx

from benchmarks.live_load import LiveLoad, start_load, wait_for_load
from benchmarks.ports import free_port
from benchmarks.report import arguments, write_report
from benchmarks.servers import HOST
from jobs.store.api_keys import create_key
from workers.settings import DEMO_MODEL

_TENANTS = ("greedy", "modest")
_LOADS = {"streams_64": (64, 1), "streams_300": (300, 1), "choices_64": (1, 64)}
_SLOTS = 64
_TOKENS = 240  # of a stream of the first tenant
_FILLING_SECONDS, _BEFORE_SECONDS, _PAUSE_SECONDS = 3.0, 5.0, 0.2
_START_SECONDS = 120.0
_REPORT_SECONDS = 6.0  # in which each worker reports
_COUNTERS = {
    "preemptions": "vllm:num_preemptions_total{",
    "recomputed_tokens": "pipeline_recomputed_tokens_total{",
    "generated_tokens": "vllm:generation_tokens_total{",
}
_BODY = {"model": "demo", "prompt": "What is 2 + 3?", "ignore_eos": True, "stream": True}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", default=str(DEMO_MODEL))
    parser.add_argument("--calls", type=int, default=20, help="of the second tenant, behind each load")
    parser.add_argument("--rounds", type=int, default=3, help="of the streams: each slot's one after the other")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as store:
        greedy, modest = [create_key(store, tenant=tenant)[1] for tenant in _TENANTS]
        with _server(args.model, store) as port, _client(port, modest) as client:
            _calls(client, args.calls)  # so that everything is loaded
            alone = _calls(client, args.calls)
            figures: dict[str, Any] = {"alone": _summary(alone)}
            for name, (streams, choices) in _LOADS.items():
                figures[name] = _behind(port, greedy, client, streams, choices, args, median(alone))
    write_report("tenants", figures, args.out, args.seed)


def _behind(
    port: int, key: str, client: httpx.Client, streams: int, choices: int, args: Any, alone: float
) -> dict[str, Any]:
    calls = max(streams, args.rounds * _SLOTS // choices)
    body = _BODY | {"max_tokens": _TOKENS, "n": choices, "stream_options": {"include_usage": True}}
    counted = _counters(client)
    load = start_load(HOST, port, [{"at": 0.0, "body": body}] * calls, streams, key)
    try:
        time.sleep(_FILLING_SECONDS)
        before = time.time()
        time.sleep(_BEFORE_SECONDS)
        begin = time.time()
        found = _calls(client, args.calls)
        end = time.time()
        figures = _figures(wait_for_load(load), found, (before, begin, end), alone)
        return figures | {name: round(value - counted[name]) for name, value in _counters(client).items()}
    finally:
        _end(load)


def _figures(load: LiveLoad, found: list[float], times: tuple[float, float, float], alone: float) -> dict[str, Any]:
    before, begin, end = times
    arrivals = sorted(when for call in load.calls for when in call.arrivals)
    if arrivals[-1] < end:
        raise RuntimeError("the first tenant's streams ended before the calls of the second: take more --rounds")
    rate, beside = _rate(arrivals, before, begin), _rate(arrivals, begin, end)
    step = _SLOTS / beside
    gaps = [gap for call in load.calls for gap in call.gaps]
    return _summary(found) | {
        "step_ms": round(1e3 * step, 1),
        "allowed_ms": round(1e3 * (3 * alone + step), 1),
        "tokens_per_second": round(rate),
        "beside_share": round(beside / rate, 3),
        "longest_gap_ms": round(1e3 * max(gaps), 1),
    }


def _counters(client: httpx.Client) -> dict[str, float]:
    """Return the counters of the worker, once it has reported again."""
    time.sleep(_REPORT_SECONDS)
    lines = client.get("/metrics").text.splitlines()
    return {
        name: sum(float(line.split()[-1]) for line in lines if line.startswith(metric))
        for name, metric in _COUNTERS.items()
    }


def _rate(arrivals: Sequence[float], begin: float, end: float) -> float:
    return sum(begin <= when < end for when in arrivals) / (end - begin)


def _calls(client: httpx.Client, count: int) -> list[float]:
    """Return the seconds to the first token of each of several calls."""
    return [_first_token(client) for _ in range(count)]


def _first_token(client: httpx.Client) -> float:
    sent, first = time.monotonic(), 0.0
    with client.stream("POST", "/v1/completions", json=_BODY | {"max_tokens": 4}) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not first and line.startswith("data: {"):
                first = time.monotonic() - sent
    time.sleep(_PAUSE_SECONDS)
    return first


@contextmanager
def _server(model: str, store: str) -> Iterator[int]:
    port = free_port()
    words = ["serve", model, "--served-model-name", "demo", "--file-store", store, "--port", str(port)]
    with (Path(store) / "log").open("w") as log:
        process = Popen([sys.executable, "-m", "pipeline", *words, "--no-deduplicate"], stdout=log, stderr=log)
        try:
            _wait_until_ready(port)
            yield port
        finally:
            _end(process)


def _wait_until_ready(port: int) -> None:
    until = time.monotonic() + _START_SECONDS
    while True:
        try:
            if httpx.get(f"http://{HOST}:{port}/ready").is_success:
                return
        except httpx.TransportError:
            pass
        if time.monotonic() > until:
            raise RuntimeError(f"the server is not ready after {_START_SECONDS:.0f} s")
        time.sleep(0.2)


def _client(port: int, key: str) -> httpx.Client:
    return httpx.Client(base_url=f"http://{HOST}:{port}", headers={"authorization": f"Bearer {key}"}, timeout=300)


def _end(process: "Popen[Any]") -> None:
    process.terminate()
    process.wait()


def _summary(seconds: Sequence[float]) -> dict[str, float]:
    return {"first_token_ms": round(1e3 * median(seconds), 1), "first_token_worst_ms": round(1e3 * max(seconds), 1)}


if __name__ == "__main__":
    main()
