"""The tables of `docs/performance.md` on live calls."""

from benchmarks.measured import Figures


def live_table(figures: Figures) -> str:
    """Return the table of the part `beside` of the figures of `live`."""
    found = figures["beside"]
    head = "| | first token, median | p99 | gap, median | p99 | longest | rows of a step | a step |"
    rows = [
        _latencies("alone", found["idle"], found["batch_alone"]),
        _latencies("live and batch", found["beside"], found["live_and_batch"]),
    ]
    return "\n".join([head, "| --- |" + " --- |" * 7, *rows]) + "\n"


def streams_table(figures: Figures) -> str:
    """Return the table of the figures of the turns with vLLM."""
    head = "| 64 streams, by `vllm bench serve` | output tok/s | first token, median | p99 | gap, p99 |"
    rows = [head, "| --- | --- | --- | --- | --- |"]
    rows.append(_server("`pipeline serve`", figures["pipeline"]))
    rows.append(_server("`vllm serve`, by turns", figures["vllm"]))
    return "\n".join(rows) + "\n"


def _latencies(title: str, live: Figures, steps: Figures) -> str:
    names = ("first_token_p50_ms", "first_token_p99_ms", "gap_p50_ms", "gap_p99_ms", "longest_gap_ms")
    times = " | ".join(f"{live[name]:,.0f} ms" for name in names)
    return f"| {title} | {times} | {steps['rows']:.0f} | {steps['step_ms']:.0f} ms |"


def _server(title: str, figures: Figures) -> str:
    return (
        f"| {title} | {figures['output_tokens_per_second']:,.0f} | {figures['first_token_p50_ms']:,.0f} ms"
        f" | {figures['first_token_p99_ms']:,.0f} ms | {figures['gap_p99_ms']:,.0f} ms |"
    )
