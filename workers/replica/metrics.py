"""Define the metrics counted in the worker process; the engine's are in `Stats`."""

import msgspec

from jobs.protocol.results import Result
from workers.engine.messages.metrics import KINDS, LATENCY_BUCKETS, Counter, Gauge, Histogram

_TOKENS = tuple(float(mantissa * 10**power) for power in range(6) for mantissa in (1, 2, 5))


class RequestMetrics:
    """Count the requests of one engine core, with gauges of its cache and speed.

    As in vLLM, each choice of a request counts as a request, except for errors.
    """

    def __init__(self) -> None:
        self.finished = Counter(
            "vllm:request_success",
            "Requests that ended in this worker; `error` are those that failed while they ran.",
            "finished_reason",
            ("stop", "length", "abort", "error"),
        )
        self.errors = Counter(
            "pipeline_request_errors", "Requests answered with an error, also those refused before they ran.", "code"
        )
        self.duplicates = Counter(
            "pipeline_duplicate_requests", "Lines of batches that got the answer of an identical one, and did not run."
        )
        self.prompt_tokens = Counter("vllm:prompt_tokens", "Prompt tokens of requests that got their first token.")
        self.cached_tokens = Counter("vllm:prompt_tokens_cached", "Prompt tokens that the prefix cache gave.")
        self.generation_tokens = Counter("vllm:generation_tokens", "Output tokens.")
        self.time_to_first_token = Histogram(
            "vllm:time_to_first_token_seconds",
            "From the arrival of a request to its first token.",
            (
                0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
                80.0, 160.0, 640.0, 2560.0,
            ),
            "kind",
            KINDS,
        )  # fmt: skip
        self.inter_token_latency = Histogram(
            "vllm:inter_token_latency_seconds",
            "Between two tokens of a request.",
            (
                0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
                80.0,
            ),
        )  # fmt: skip
        self.latency = Histogram(
            "vllm:e2e_request_latency_seconds",
            "From the arrival of a request to its result.",
            LATENCY_BUCKETS,
            "kind",
            KINDS,
        )
        self.prompt_length = Histogram("vllm:request_prompt_tokens", "Prompt tokens of a finished request.", _TOKENS)
        self.output_length = Histogram(
            "vllm:request_generation_tokens", "Output tokens of a finished request.", _TOKENS
        )
        self.kv_cache_usage = Gauge("vllm:kv_cache_usage_perc", "Share of the KV cache's blocks that is in use.")
        self.blocks = Gauge("pipeline_engine_blocks", "Blocks of the KV cache.")
        self.tokens_per_second = Gauge(
            "pipeline_engine_tokens_per_second",
            "Output tokens per second between the worker's last two reports, which come every 5 seconds.",
        )

    def count_error(self, result: Result) -> None:
        """Count a request that was answered with an error."""
        error = msgspec.json.decode(result.body)["error"]
        self.errors.add(1, error["code"] or error["type"])

    def all(self) -> list[Counter]:
        return list(vars(self).values())
