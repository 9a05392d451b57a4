"""Live streams beside a batch of long prompts, phase by phase: live alone, the batch alone, both,
the batch alone again.
"""

import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.batch_sizes import measure as decode_step_seconds
from benchmarks.live_latencies import latencies
from benchmarks.live_load import LiveLoad, MeasuredCall, start_load, wait_for_load
from benchmarks.live_metrics import COMPUTED, GENERATED, ROWS, STEP_SECONDS, MetricsRecorder, Span
from benchmarks.live_prompts import body, streamed, write_batch
from benchmarks.servers import HOST, Server
from workers.engine.messages.config import CPU_LIVE_STEP_MS

_UNNOTICED_GAP_MS = 250.0  # allowed however fast a decode step is
_LIVE_TOKENS = (64, 32)  # of a call's prompt and its answer
_BATCH_TOKENS, _BATCH_OUTPUT = 900, (32, 120)
_LEAST_SECONDS = 16.0  # of a phase: two reports, also where one comes late
_STEP_CONTEXT = 950  # of the decode step that gaps are held against


@dataclass(frozen=True, slots=True)
class Phases:
    """The seconds of each phase, in order; `filling` is the unmeasured start of the batch."""

    live: float = 40.0
    filling: float = 35.0
    batch: float = 45.0
    both: float = 75.0
    after: float = 30.0

    def scaled(self, share: float) -> "Phases":
        """Return phases in which workers report at least twice."""
        return Phases(*(max(_LEAST_SECONDS, share * getattr(self, field.name)) for field in fields(self)))


def measure(server: Server, phases: Phases, every: float, lines: int, seed: int) -> dict[str, Any]:
    """Return the figures, with the points of the picture as `timeline`.

    every: mean seconds between two live calls.
    """
    with MetricsRecorder(server) as recorder:
        began = time.time()
        idle = _live_calls(server, phases.live, every, seed)
        with _running_batch(server, lines, seed):
            batch_began = time.time()
            time.sleep(phases.filling)
            alone = _wait(phases.batch)
            both_began = time.time()
            beside = _live_calls(server, phases.both, every, seed + 1)
            both = (both_began, time.time())
            again = _wait(phases.after)
        ended = time.time()
        marks = [("live alone", began, batch_began), ("batch alone", batch_began, both[0])]
        marks += [("live and batch", *both), ("batch alone", both[1], ended)]
        throughput = _throughputs(
            _joined(recorder.whole(*alone), recorder.whole(*again)),
            recorder.whole(*both),
            recorder.spans(batch_began, both[0]) + recorder.spans(*again),
        )
        timeline = _timeline(began, marks, [*idle.calls, *beside.calls], recorder.spans(began, ended))
    rows = round(throughput["live_and_batch"]["rows"])
    return _latencies(server.model, idle, beside, rows) | throughput | {"timeline": timeline}


def _live_calls(server: Server, seconds: float, every: float, seed: int) -> LiveLoad:
    """Run random live calls for `seconds` by the load generator; wait for the last."""
    draw = random.Random(seed)
    calls, at = [], draw.expovariate(1 / every)
    while at < seconds:
        calls.append({"at": at, "body": streamed(body(draw, server.model, *_LIVE_TOKENS))})
        at += draw.expovariate(1 / every)
    return wait_for_load(start_load(HOST, server.port, calls))


def _wait(seconds: float) -> tuple[float, float]:
    """Wait for `seconds`; return the begin and the end."""
    began = time.time()
    time.sleep(seconds)
    return began, time.time()


@contextmanager
def _running_batch(server: Server, lines: int, seed: int) -> Iterator[None]:
    """Submit a batch and cancel it at the end. Raise RuntimeError if it ended earlier."""
    with tempfile.TemporaryDirectory() as scratch, httpx.Client(base_url=server.url, timeout=120) as client:
        path = write_batch(Path(scratch) / "batch.jsonl", lines, server.model, seed, _BATCH_TOKENS, _BATCH_OUTPUT)
        with path.open("rb") as content:
            answer = client.post("/v1/files", files={"file": content}, data={"purpose": "batch"})
        asked = {"endpoint": "/v1/completions", "completion_window": "24h"}
        asked["input_file_id"] = answer.raise_for_status().json()["id"]
        batch = client.post("/v1/batches", json=asked).raise_for_status().json()["id"]
        yield
        found = client.get(f"/v1/batches/{batch}").raise_for_status().json()
        if found["status"] != "in_progress":
            raise RuntimeError(f"the batch was {found['status']} before the last phase ended: give it more --lines")
        client.post(f"/v1/batches/{batch}/cancel").raise_for_status()


def _joined(first: Span, second: Span) -> Span:
    """Return two spans as one, without the time between them."""
    counted = {name: value + second.counted[name] for name, value in first.counted.items()}
    return Span(first.begin, first.end + second.seconds, counted)


def _latencies(model: str, idle: LiveLoad, beside: LiveLoad, rows: int) -> dict[str, Any]:
    """Return the latencies that clients measured, and their limits."""
    latency = {"idle": latencies(idle.calls), "beside": latencies(beside.calls)}
    first_token_limit = 3 * latency["idle"]["first_token_p99_ms"] + CPU_LIVE_STEP_MS
    gap_limit = _gap_allowed_ms(model, latency["beside"]["longest_gap_ms"], rows)
    return {
        **latency,
        "first_token_allowed_ms": round(first_token_limit, 1),
        "first_token_share": round(latency["beside"]["first_token_p99_ms"] / first_token_limit, 3),
        "gap_allowed_ms": round(gap_limit, 1),
        "gap_share": round(latency["beside"]["longest_gap_ms"] / gap_limit, 3),
        "load_generator_cores": round(beside.cpu_seconds / beside.seconds, 4),
    }


def _gap_allowed_ms(model: str, longest_ms: float, rows: int) -> float:
    """Return the longest gap allowed; a decode step of `rows` is measured where it matters."""
    if longest_ms <= _UNNOTICED_GAP_MS:
        return _UNNOTICED_GAP_MS
    return max(_UNNOTICED_GAP_MS, 1.25e3 * decode_step_seconds(model, rows, _STEP_CONTEXT, 2.0))


def _throughputs(alone: Span, both: Span, spans_alone: Sequence[Span]) -> dict[str, Any]:
    return {
        "batch_alone": _throughput(alone),
        "live_and_batch": _throughput(both),
        "ratio": round(work_ratio(spans_alone, both), 3),
        "tokens_ratio": round(both.rate(COMPUTED) / alone.rate(COMPUTED), 3),
        "output_ratio": round(both.rate(GENERATED) / alone.rate(GENERATED), 3),
    }


def work_ratio(alone: Sequence[Span], both: Span) -> float:
    """Return the seconds that the batch alone takes for the work of one second of `both`.

    A batch computes prompts for a while, then answers, and tokens of answers cost more. So the
    costs of prompt and answer tokens are fitted to all spans of the batch alone.
    """
    costs = np.linalg.lstsq(np.array([_work(span) for span in alone]), np.array([span.seconds for span in alone]))[0]
    return float(costs @ _work(both)) / both.seconds


def _work(span: Span) -> tuple[float, float]:
    """Return the tokens of prompts and of answers."""
    generated = span.counted[GENERATED]
    return span.counted[COMPUTED] - generated, generated


def _throughput(span: Span) -> dict[str, float]:
    return {
        "tokens_per_second": round(span.rate(COMPUTED), 1),
        "prompt_tokens_per_second": round(span.rate(COMPUTED) - span.rate(GENERATED), 1),
        "output_tokens_per_second": round(span.rate(GENERATED), 1),
        "rows": round(span.per_step(ROWS), 1),
        "step_ms": round(1e3 * span.per_step(STEP_SECONDS), 1),
    }


def _timeline(
    began: float, marks: list[tuple[str, float, float]], calls: list[MeasuredCall], spans: list[Span]
) -> dict[str, Any]:
    """Return the points of the picture; times are in seconds after the beginning."""
    return {
        "phases": [[name, round(begin - began, 1), round(end - began, 1)] for name, begin, end in marks],
        "calls": [
            [
                round(call.sent - began, 2),
                round(1e3 * call.first_token_seconds, 1),
                round(1e3 * max(call.gaps, default=0.0), 1),
            ]
            for call in calls
        ],
        "tokens_per_second": [
            [
                round(span.begin - began, 1),
                round(span.end - began, 1),
                round(max(0.0, span.rate(COMPUTED) - _live_rate(calls, span)), 1),
                round(_live_rate(calls, span), 1),
            ]
            for span in spans
        ],
    }


def _live_rate(calls: Sequence[MeasuredCall], span: Span) -> float:
    """Return tokens of live calls per second; a prompt counts at its first token."""
    tokens = 0.0
    for call in calls:
        within = [span.begin <= when < span.end for when in call.arrivals]
        tokens += call.prompt_tokens * within[0] + call.output_tokens * sum(within) / len(within)
    return tokens / span.seconds
