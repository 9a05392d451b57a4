"""That the benchmark of live calls runs, and that what it reads and draws is right."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks import goals, live_beside, live_latencies, live_load, live_metrics, live_table
from benchmarks.live_load import MeasuredCall
from benchmarks.live_plot import live_plot
from benchmarks.processor import AVX512_BF16
from tests.benchmarks.stored_results import store_result

USAGE = {"prompt_tokens": 3, "completion_tokens": 2}
STREAM = [
    {"choices": [{"text": "a"}]},
    {"choices": [{"text": ""}]},
    {"choices": [], "usage": USAGE},
]
LATENCY = {
    "calls": 2,
    "first_token_p50_ms": 100.0,
    "first_token_p99_ms": 120.0,
    "gap_p50_ms": 20.0,
    "gap_p99_ms": 40.0,
    "longest_gap_ms": 60.0,
}
RATES = {"prompt_tokens_per_second": 1500.0, "output_tokens_per_second": 90.0, "rows": 60.0, "step_ms": 140.0}
BESIDE = {
    "idle": LATENCY,
    "beside": LATENCY | {"first_token_p99_ms": 480.0},
    "first_token_allowed_ms": 510.0,
    "first_token_share": 0.941,
    "gap_allowed_ms": 250.0,
    "gap_share": 0.24,
    "batch_alone": RATES,
    "live_and_batch": RATES | {"prompt_tokens_per_second": 1455.0},
    "ratio": 0.97,
    "timeline": {
        "phases": [["live alone", 0.0, 20.0], ["batch alone", 20.0, 50.0], ["live and batch", 50.0, 100.0]],
        "calls": [[1.0, 100.0, 40.0], [60.0, 480.0, 60.0]],
        "tokens_per_second": [[20.0, 25.0, 1500.0, 0.0], [60.0, 65.0, 1400.0, 55.0]],
    },
}


def test_what_a_client_sees_of_a_stream() -> None:
    with answering(STREAM) as port:
        load = live_load.wait_for_load(
            live_load.start_load("127.0.0.1", port, [{"at": 0, "body": {}}] * 3, concurrency=2)
        )
    assert [(call.prompt_tokens, call.output_tokens, len(call.arrivals)) for call in load.calls] == [(3, 2, 2)] * 3
    assert all(call.first_token_seconds > 0 for call in load.calls)
    assert load.output_tokens == 6
    assert load.cpu_seconds > 0


def test_a_call_that_fails_is_no_figure() -> None:
    with answering([], status="503 Service Unavailable", words=b"no model") as port:
        process = live_load.start_load("127.0.0.1", port, [{"at": 0, "body": {}}])
        with pytest.raises(RuntimeError, match=r"a call failed: .*no model"):
            live_load.wait_for_load(process)


def test_figures_of_calls() -> None:
    calls = [MeasuredCall(10.0, [10.1, 10.2, 10.5], 64, 3), MeasuredCall(20.0, [20.3, 20.4], 64, 2)]
    found = live_latencies.latencies(calls)
    assert (found["first_token_p50_ms"], found["first_token_p99_ms"]) == (200.0, 300.0)
    assert (found["gap_p50_ms"], found["longest_gap_ms"]) == (100.0, 300.0)
    assert live_latencies.percentile(range(1, 101), 0.99) == 100
    assert live_latencies.percentile(range(1, 202), 0.99) == 199


def test_counters_are_summed_over_workers() -> None:
    text = (
        "# TYPE vllm:generation_tokens_total counter\n"
        'vllm:generation_tokens_total{worker="a"} 3.0\nvllm:generation_tokens_total{worker="b"} 4.5\n'
        'pipeline_step_rows_bucket{worker="a",le="1"} 9\npipeline_step_rows_sum{worker="a"} 12\n'
    )
    assert live_metrics.counters(text) == {live_metrics.GENERATED: 7.5, live_metrics.ROWS: 12.0}


def test_the_picture_has_every_call_and_every_phase() -> None:
    drawn = live_plot(BESIDE)
    legend = 1
    assert drawn.count('<circle class="first"') == 2 + legend
    assert drawn.count('<circle class="gap"') == 2 + legend
    assert drawn.count('<rect class="batch"') == 2 + legend
    assert drawn.count('class="phase"') == 2  # one phase of three, in both panels
    for name in ("live alone", "batch alone", "live and batch", "100 ms", "1,500"):
        assert f">{name}</text>" in drawn


def test_the_tables_say_what_is_allowed_and_what_falls_short(tmp_path: Path) -> None:
    table = live_table.live_table({"beside": BESIDE})
    assert "| alone | 100 ms | 120 ms | 20 ms | 40 ms | 60 ms | 60 | 140 ms |" in table
    figures: dict[str, Any] = {"beside": BESIDE | {"ratio": 0.85}}
    figures["streams"] = {"ratio": 0.96, "output_tokens_per_second": 960.0, "engine_output_tokens_per_second": 1000.0}
    store_result(tmp_path, "live-gpt2-124m", figures, AVX512_BF16)
    store_result(tmp_path, "idle-gpt2-124m", {"cores": 0.004, "seconds": 60.0}, AVX512_BF16)
    rows = goals.table(tmp_path)
    assert "of what is allowed | AMD EPYC (AVX512-BF16) | ≤ 1.00x / 0.70x | 0.94x: 480 ms of 510 ms, 2026" in rows
    work = "prompts 1,455 against 1,500, answers 90 against 90 tok/s"
    assert f"| 0.90x / 0.97x | 0.85x (short): {work}, 2026-01-02 |" in rows
    assert "of a core | AMD EPYC (AVX512-BF16) | ≤ 1.0 % / 0.5 % | 0.4 %: over 60 s, 2026-01-02 |" in rows


def test_work_is_weighed_by_what_it_costs_the_batch_alone() -> None:
    """A second is 1,000 tokens of prompts or 100 of answers: spans of either kind, then both."""

    def span(seconds: float, prompts: float, answers: float) -> live_metrics.Span:
        return live_metrics.Span(
            0.0, seconds, {live_metrics.COMPUTED: prompts + answers, live_metrics.GENERATED: answers}
        )

    alone = [span(5, 5000, 0), span(5, 1000, 400), span(5, 0, 500)]
    assert live_beside.work_ratio(alone, span(10, 4000, 500)) == pytest.approx(0.9)


@pytest.mark.proof
def test_every_part_runs_on_a_tiny_model(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.live", "--model", "tiny", "--out", str(tmp_path), "--scale", "0.02"]
    command += ["--every", "0.5", "--lines", "15000", "--concurrency", "4", "--requests", "8", "--turns", "1"]
    subprocess.run(command, env={**os.environ, "BENCHMARK_CACHE": str(tmp_path / "cache")}, check=True, timeout=290)
    figures = json.loads(next(tmp_path.glob("*/live-tiny.json")).read_text())["figures"]
    assert figures["beside"]["beside"]["calls"] > 0
    assert figures["beside"]["live_and_batch"]["tokens_per_second"] > 0
    assert figures["streams"]["ratio"] > 0
    assert live_plot(figures["beside"]).startswith("<svg")


@contextmanager
def answering(events: list[Any], status: str = "200 OK", words: bytes = b"") -> Iterator[int]:
    """The port of a server that answers every request with the same stream."""
    content = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
    head = f"HTTP/1.1 {status}\r\nConnection: close\r\n\r\n".encode()
    loop, started, ports = asyncio.new_event_loop(), threading.Event(), []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n{}")
        writer.write(head + content + (b"data: [DONE]\n\n" if events else words))
        await writer.drain()
        writer.close()

    async def serve() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        ports.append(server.sockets[0].getsockname()[1])
        started.set()

    def run() -> None:
        loop.run_until_complete(serve())
        loop.run_forever()

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(30)
    try:
        yield ports[0]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
