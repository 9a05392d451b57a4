"""Messages between the worker process and the engine core, as msgspec structs.

The worker process' first frame is an `EngineConfig`; then come `ToCore` messages. The core answers
with one `Ready` or `Failed`, then with one `StepOutput` per step; a `Failed` after `Ready` says why
the core is about to end.
"""

import math
from enum import IntEnum
from typing import Annotated

import msgspec

from workers.engine.messages.metrics import KINDS, LATENCY_BUCKETS, Counter, Gauge, Histogram

MAX_SEED = 2**64 - 1


class Finish(IntEnum):
    """Why a request ended; RUNNING means that it has not, INVALID that its own parameters leave no
    token that it could go on with.
    """

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4
    INVALID = 5


class SamplingParams(msgspec.Struct, frozen=True):
    """How one request's tokens are drawn and when it ends.

    Raises ValueError for a value out of range.

    `temperature` 0 is greedy, `top_k` 0 keeps all tokens, `choice` separates the noise of one
    request's choices. Repetition counts prompt and output, presence and frequency the output. Stop
    and end-of-text tokens cannot come among the first `min_tokens`. `logit_bias` holds pairs of
    token and what is added to its logit; `bad_words` are runs of tokens that never come about in
    the output; where `allowed_token_ids` are given, no other token does. `logprobs` and
    `prompt_logprobs`: how many of the most likely tokens to report at each position beside its own
    token; -1 for no log probabilities at all.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    choice: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    logprobs: int = -1
    prompt_logprobs: int = -1

    def __post_init__(self) -> None:
        for name, (interval, low, high) in _RANGES.items():
            value = getattr(self, name)
            if not low <= value <= high or value == math.inf or (value == low and interval[0] == "("):
                raise ValueError(f"{name} must lie in {interval}, got {value}")
        for token, bias in self.logit_bias:
            if token < 0 or not math.isfinite(bias):
                raise ValueError(f"logit_bias must map token ids to finite numbers, got {token}: {bias}")
        for word in self.bad_words:
            if not word or min(word) < 0:
                raise ValueError(f"bad_words must hold runs of token ids, got {list(word)}")


_RANGES = {
    "max_tokens": ("[0, inf)", 0, math.inf),
    "temperature": ("[0, inf)", 0, math.inf),
    "top_p": ("[0, 1]", 0, 1),
    "top_k": ("[0, inf)", 0, math.inf),
    "seed": ("[0, 2**64)", 0, MAX_SEED),
    "choice": ("[0, inf)", 0, math.inf),
    "min_p": ("[0, 1]", 0, 1),
    "presence_penalty": ("[-2, 2]", -2, 2),
    "frequency_penalty": ("[-2, 2]", -2, 2),
    "repetition_penalty": ("(0, inf)", 0, math.inf),
    "min_tokens": ("[0, inf)", 0, math.inf),
    "logprobs": ("[-1, inf)", -1, math.inf),
    "prompt_logprobs": ("[-1, inf)", -1, math.inf),
}
"""By parameter: the range as a person reads it, and its bounds."""

EVERY_FEATURE = SamplingParams(
    max_tokens=1,
    min_tokens=1,
    temperature=1.0,
    top_p=0.99,
    top_k=2000,
    min_p=1e-6,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    repetition_penalty=1.1,
    logit_bias=((0, 0.5),),
    bad_words=((0,),),
    allowed_token_ids=tuple(range(1, 1025)),
    logprobs=20,
    prompt_logprobs=20,
)
"""Uses every stage of sampling, with limits that leave many tokens: what the memory profiling run
asks for.
"""


class PoolingParams(msgspec.Struct, frozen=True):
    """What a pooling request yields.

    `task`: "embed", one vector; "classify", one number per label; "token_embed", a row per token.
    `dimensions` cuts a vector, 0 keeps all of it. `normalize`: to length 1; None as the model's
    folder says. `activation`: sigmoid or softmax over a classifier's logits, as its folder says.
    `unpooled`: how many tokens at the beginning are left out of means and maxima.
    """

    task: str
    dimensions: int = 0
    normalize: bool | None = None
    activation: bool = True
    unpooled: int = 0


class OutputGuide(msgspec.Struct, frozen=True):
    """What a request's output must be made of.

    `grammar` is one of llguidance's, in its JSON form; "" allows everything. It begins behind
    `reasoning_end`, a text that ends the reasoning; where that is "", or was in the prompt
    (`in_reasoning` false), at once. With `reasoning_begin` there is reasoning only if the output
    begins with that text, and else the grammar begins at once. After `reasoning_budget` tokens of
    reasoning its end is enforced; -1 for no budget.
    """

    grammar: str = ""
    reasoning_end: str = ""
    in_reasoning: bool = False
    reasoning_budget: int = -1
    reasoning_begin: str = ""


class EngineRequest(msgspec.Struct):
    """One sequence to generate, or, with `pooling`, one text to make a vector of.

    `request_id` is chosen by the worker process and unique in the core's life. `output_token_ids`
    is what an earlier worker generated already: it counts towards `max_tokens`, as output in
    everything else, and is never sent again. A lower `priority` runs first, among live and among
    batch requests; equals run in the order in which they came. Requests of one `batch_id` are
    expected to have outputs of about equal length. With `stop_strings` the worker process may end
    the request by its text, which the engine does not see. `arrived` is when it came, on the
    machine's monotonic clock; 0 where that is not to be counted. With a `guide` it waits until that
    is made, and ends with Finish.STOP, without a further token, where that allows nothing more.
    `timed`: outputs say when it got a slot. A pooling request has no output, and its `sampling`
    is not read; `second_text` is the index of the first token of a pair's second text, 0 for none.
    """

    request_id: int
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    sampling: SamplingParams
    live: bool = False
    priority: int = 0
    batch_id: str = ""
    stop_strings: bool = False
    arrived: float = 0.0
    guide: OutputGuide | None = None
    timed: bool = False
    pooling: PoolingParams | None = None
    second_text: int = 0


class SetVocabulary(msgspec.Struct, tag="vocabulary", array_like=True):
    """The bytes of each token, by id; it comes before the first request that has a guide.

    Those of special tokens, and of ids that no text has, are empty.
    """

    tokens: list[bytes]


class AddRequests(msgspec.Struct, tag="add", array_like=True):
    requests: list[EngineRequest]


class AbortRequests(msgspec.Struct, tag="abort", array_like=True):
    request_ids: list[int]


class Shutdown(msgspec.Struct, tag="shutdown", array_like=True):
    pass


class Ready(msgspec.Struct, tag="ready", array_like=True, kw_only=True):
    """The core has its model and serves.

    `num_blocks` includes the null block; `max_model_len` is no more than the KV cache can hold.
    `cache_dtype` is that of keys and values; `quantization` is "" for none.
    `weights_seconds`: how long loading took. `gpus`: what the driver calls the GPUs that it runs
    on ("GPU-" and a UUID). `model_digest` identifies the model's configuration and weights.
    `tasks`: "generate", or those of "embed", "token_embed", "classify" and "score" that it can
    do. `embedding_size` is 0 without embeddings; `matryoshka` has the sizes that they may have,
    and is empty if these are all up to that one. `labels` are a classifier's.
    """

    max_model_len: int
    num_blocks: int
    block_size: int
    vocab_size: int
    eos_token_ids: list[int]
    dtype: str
    device: str
    max_num_seqs: int
    max_num_batched_tokens: int
    depth: int
    threads: int
    weights_seconds: float
    gpus: list[str] = []
    backend: str = ""
    cache_dtype: str = ""
    quantization: str = ""
    model_digest: str = ""
    tasks: list[str] = msgspec.field(default_factory=lambda: ["generate"])
    embedding_size: int = 0
    labels: list[str] = []
    matryoshka: list[int] = []


class Failed(msgspec.Struct, tag="failed", array_like=True):
    """The core cannot start, or cannot go on: one sentence that says why."""

    message: str


Observed = list[tuple[float, str]]
"""What was observed since the last message, each with the value of the metric's label."""


class Stats(msgspec.Struct, array_like=True):
    """Numbers of the core. Those that are annotated are metrics: a gauge is a current value, a
    counter a total; the observations of a histogram are sent once.

    `tokens` counts generated tokens, `computed_tokens` those run through the model,
    `prefix_hit_tokens` those that the cache gave instead, also to preempted requests.
    `full_step_seconds` is how long a step of the largest size may take, judged by the steps so far.
    """

    running: Annotated[int, Gauge("vllm:num_requests_running", "Sequences that run in the engine.")] = 0
    waiting: Annotated[int, Gauge("vllm:num_requests_waiting", "Sequences that wait in the engine for room.")] = 0
    free_blocks: Annotated[int, Gauge("pipeline_engine_free_blocks", "Free blocks of the KV cache.")] = 0
    steps: int = 0
    tokens: int = 0
    computed_tokens: int = 0
    prefix_hit_tokens: int = 0
    full_step_seconds: float = 0.0
    preemptions: Annotated[int, Counter("vllm:num_preemptions", "Preemptions of running sequences.")] = 0
    recomputed_tokens: Annotated[
        int, Counter("pipeline_recomputed_tokens", "Tokens that a preempted request had computed before.")
    ] = 0
    prefix_queries: Annotated[
        int, Counter("vllm:prefix_cache_queries", "Prompt tokens that were looked up in the prefix cache.")
    ] = 0
    prefix_hits: Annotated[
        int, Counter("vllm:prefix_cache_hits", "Prompt tokens that were found in the prefix cache.")
    ] = 0
    queue_seconds: Annotated[
        Observed,
        Histogram(
            "vllm:request_queue_time_seconds",
            "From the arrival of a request to the first step that computes it.",
            LATENCY_BUCKETS,
            "kind",
            KINDS,
        ),
    ] = []
    step_seconds: Annotated[
        Observed,
        Histogram(
            "pipeline_step_seconds",
            "How long a step took.",
            (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
        ),
    ] = []
    step_rows: Annotated[
        Observed,
        Histogram(
            "pipeline_step_rows",
            "Sequences that a step computes.",
            (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0),
        ),
    ] = []
    step_tokens: Annotated[
        Observed,
        Histogram(
            "vllm:iteration_tokens_total",
            "Tokens that a step computes.",
            (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0),
        ),
    ] = []


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Natural log probabilities at one position, from the model's own distribution: before bias,
    penalties, temperature and all else.

    The position's own token comes first, then the most likely ones, best first, so that it may
    come twice. `rank` is its place among all tokens, 1 for the most likely.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class StepOutput(msgspec.Struct, tag="step", array_like=True):
    """What one step produced, one entry per request that got a token or ended.

    `counts[i]` tokens of request `request_ids[i]` follow each other in the flat `token_ids`.
    `finish[i]` is a `Finish` value; `stop_token[i]` the id that ended the request, which is the
    last of its tokens, or -1. `cached_tokens[i]`, in the request's first entry, counts the prompt
    tokens that the prefix cache gave; it is 0 in all later ones. `errors` gives a sentence for each
    request ended by ERROR or INVALID. `logprobs` has, by request id, one item per token of the
    entry; `prompt_logprobs`, with the first token of a request, one per prompt token from the
    second on. `starts` has, with the next entry of a request, each step in which it got a slot, and
    when that was planned on the machine's monotonic clock: its first step, then one after each
    preemption. All three hold only requests that asked. `pooled` has what a pooling request
    yields, which ends with STOP and without a token: float32, little-endian, row by row.
    `device_seconds` has what a request that ended took of the devices, its share of each step by
    its tokens there; with `stop_strings` of one that goes on too, so far.
    """

    step: int
    request_ids: list[int]
    counts: list[int]
    token_ids: list[int]
    finish: list[int]
    stop_token: list[int]
    cached_tokens: list[int]
    stats: Stats
    errors: dict[int, str] = {}
    logprobs: dict[int, list[TokenLogprobs]] = {}
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    starts: dict[int, list[tuple[int, float]]] = {}
    pooled: dict[int, bytes] = {}
    device_seconds: dict[int, float] = {}


ToCore = SetVocabulary | AddRequests | AbortRequests | Shutdown
FromCore = Ready | Failed | StepOutput
