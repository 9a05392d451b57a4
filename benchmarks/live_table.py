"""What live calls cost and are spared, as the tables of `docs/performance.md`."""

from benchmarks.measured import Figures


def live_table(figures: Figures) -> str:
    """From the part `beside` of the figures of `live`."""
    found = figures["beside"]
    idle, beside = found["idle"], found["beside"]
    batch, both = found["batch_alone"], found["live_and_batch"]
    rows = [
        _latency("first token, median", "first_token_p50_ms", idle, beside),
        _latency("first token, p99", "first_token_p99_ms", idle, beside, found["first_token_allowed_ms"]),
        _latency("gap in a stream, median", "gap_p50_ms", idle, beside),
        _latency("gap in a stream, p99", "gap_p99_ms", idle, beside),
        _latency("longest gap", "longest_gap_ms", idle, beside, found["gap_allowed_ms"]),
        f"| all tokens, at their cost | 1.00x | {found['ratio']:.2f}x | at least 0.90x |",
        f"| tokens/s, prompts | {batch['prompt_tokens_per_second']:,.0f} | {both['prompt_tokens_per_second']:,.0f} | |",
        f"| tokens/s, answers | {batch['output_tokens_per_second']:,.0f} | {both['output_tokens_per_second']:,.0f} | |",
        f"| rows of a step | {batch['rows']:.0f} | {both['rows']:.0f} | |",
        f"| a step | {batch['step_ms']:.0f} ms | {both['step_ms']:.0f} ms | |",
    ]
    return "\n".join(["| | alone | live and batch | allowed |", "| --- | --- | --- | --- |", *rows]) + "\n"


def streams_table(live: Figures | None, against: Figures | None) -> str:
    """From the part `streams` of the figures of `live`, and from those of its turns with vLLM; what
    was not measured is left out.
    """
    head = "| 64 streams at once | output tok/s | first token, median | p99 | gap, p99 |"
    rows = [head, "| --- | --- | --- | --- | --- |"]
    if live:
        alone = live["streams"]
        rows.append(_server("`pipeline serve`", alone))
        rows.append(f"| the engine alone, by turns | {alone['engine_output_tokens_per_second']:,.0f} | | | |")
    if against:
        rows.append(_server("`pipeline serve`, by `vllm bench serve`", against["pipeline"]))
        rows.append(_server("`vllm serve`, by turns", against["vllm"]))
    return "\n".join(rows) + "\n"


def _latency(title: str, name: str, idle: Figures, beside: Figures, allowed: float | None = None) -> str:
    bar = "" if allowed is None else f"{allowed:,.0f} ms"
    return f"| {title} | {idle[name]:,.0f} ms | {beside[name]:,.0f} ms | {bar} |"


def _server(title: str, figures: Figures) -> str:
    return (
        f"| {title} | {figures['output_tokens_per_second']:,.0f} | {figures['first_token_p50_ms']:,.0f} ms"
        f" | {figures['first_token_p99_ms']:,.0f} ms | {figures['gap_p99_ms']:,.0f} ms |"
    )
