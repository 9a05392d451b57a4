"""Messages between the worker process and the engine core, as msgspec structs.

The worker process sends an `EngineConfig` as its first frame, then `ToCore` messages. The core
answers with one `Ready` or `Failed`, then with one `StepOutput` per step. A `Failed` after `Ready`
is the reason for the core's imminent end.
"""

import math
from enum import IntEnum
from typing import Annotated

import msgspec

from workers.engine.messages.metrics import KINDS, LATENCY_BUCKETS, Counter, Gauge, Histogram

MAX_SEED = 2**64 - 1


ALL_EXCLUDED = (
    "no token is left to go on with: allowed_token_ids, bad_words and min_tokens rule out all of them; give up one of"
    " them"
)
"""The error of a request that ends with `Finish.INVALID` and has no grammar."""


class Finish(IntEnum):
    """The reason for a request's end.

    RUNNING: it has not ended. INVALID: its own parameters allow no next token, or its grammar
    cannot be followed. NOT_FINITE: the model computed NaN or infinity for it.
    """

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4
    INVALID = 5
    NOT_FINITE = 6


class SamplingParams(msgspec.Struct, frozen=True):
    """Sampling and stopping parameters of one request.

    Raises ValueError for a value out of range.

    - `temperature`: 0 is greedy.
    - `top_k`: 0 keeps all tokens.
    - `choice` separates the noise of one request's choices.
    - The repetition penalty counts prompt and output; presence and frequency count the output.
    - `min_tokens`: the first ones are no stop or end-of-text tokens.
    - `logit_bias`: pairs of a token and the number added to its logit.
    - `bad_words`: runs of tokens that never occur in the output.
    - `allowed_token_ids`: if given, no other token is drawn.
    - `logprobs`, `prompt_logprobs`: the number of most likely tokens to report at each position, in
      addition to its own token; -1 for no log probabilities.
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

    @property
    def excludes_tokens(self) -> bool:
        """Return whether some tokens may not be drawn."""
        return bool(self.allowed_token_ids or self.bad_words or self.min_tokens)

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
"""By parameter: the range as text, and its bounds."""

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
"""Parameters of the memory profiling run: all stages of sampling, with limits that keep many
tokens.
"""


class PoolingParams(msgspec.Struct, frozen=True):
    """Parameters of one pooling request.

    - `task`: "embed", one vector; "classify", one number per label; "token_embed", a row per token.
    - `dimensions` truncates a vector; 0 keeps all of it.
    - `normalize`: scale to length 1; None: the default of the model's folder.
    - `activation`: apply the sigmoid or softmax of the model's folder to a classifier's logits.
    - `unpooled`: number of tokens at the beginning that means and maxima omit.
    """

    task: str
    dimensions: int = 0
    normalize: bool | None = None
    activation: bool = True
    unpooled: int = 0


class OutputGuide(msgspec.Struct, frozen=True):
    """The grammar and the reasoning of a request's output.

    - `grammar`: a grammar of llguidance in JSON form; "" allows everything. It begins after the
      reasoning, or at once if there is none.
    - `reasoning_end`: the text that ends the reasoning; "" for no reasoning.
    - `in_reasoning`: false if the prompt has ended the reasoning; the grammar begins at once.
    - `reasoning_begin`: if not "", there is reasoning only if the output begins with this text.
    - `reasoning_budget`: tokens of reasoning after which its end is enforced; -1 for no budget.
    """

    grammar: str = ""
    reasoning_end: str = ""
    in_reasoning: bool = False
    reasoning_budget: int = -1
    reasoning_begin: str = ""


class LiveShare(msgspec.Struct, frozen=True):
    """The tenant and the call among which live requests share the slots; both names are opaque.

    A tenant of weight 2 gets twice the slots of one of weight 1.
    """

    tenant: str
    call: str
    weight: float = 1.0


class EngineRequest(msgspec.Struct):
    """One sequence to generate, or, with `pooling`, one text to pool.

    - `request_id`: chosen by the worker process, unique in the core's life.
    - `output_token_ids`: tokens that an earlier worker generated. They count as output, also
      towards `max_tokens`, and are never sent again.
    - `priority`: a lower one runs first, among live and among batch requests; requests of equal
      priority run in order of arrival.
    - `batch_id`: requests of one batch are expected to have outputs of about equal length.
    - `stop_strings`: the worker process may end the request by its text, which the engine does not
      have.
    - `arrived`: time of arrival on the machine's monotonic clock; 0 to omit it from the metrics.
    - `guide`: the request waits until its guide is ready. It ends with Finish.STOP, without a
      further token, when the guide allows no more.
    - `timed`: outputs include the times at which it got a slot.
    - `pooling`: the request has no output, and `sampling` is ignored.
    - `second_text`: index of the first token of a pair's second text, 0 for none.
    - `share`: of a live request; without one, all requests belong to one tenant.
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
    share: LiveShare | None = None


class SetVocabulary(msgspec.Struct, tag="vocabulary", array_like=True):
    """The bytes of each token, by id; sent before the first request with a guide.

    Special tokens, and ids that no text contains, have no bytes.
    """

    tokens: list[bytes]


class AddRequests(msgspec.Struct, tag="add", array_like=True):
    requests: list[EngineRequest]


class AbortRequests(msgspec.Struct, tag="abort", array_like=True):
    request_ids: list[int]


class Shutdown(msgspec.Struct, tag="shutdown", array_like=True):
    pass


class Ready(msgspec.Struct, tag="ready", array_like=True, kw_only=True):
    """The core has loaded its model and accepts requests.

    - `num_blocks` includes the null block; a block has `block_size` tokens in all layers.
    - `cache_tokens`: tokens that the KV cache holds of requests of `max_model_len` tokens, which
      fits into it.
    - `cache_dtype`: dtype of keys and values.
    - `quantization`: "" for none.
    - `weights_seconds`: duration of loading the weights.
    - `gpus`: the driver's names of the core's GPUs ("GPU-" and a UUID).
    - `model_digest` identifies the model's configuration and weights.
    - `tasks`: "generate", or some of "embed", "token_embed", "classify" and "score".
    - `embedding_size`: 0 without embeddings.
    - `matryoshka`: valid sizes of embeddings; empty if all up to `embedding_size` are valid.
    - `labels`: the labels of a classifier.
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
    cache_tokens: int = 0


class Failed(msgspec.Struct, tag="failed", array_like=True):
    """The core cannot start, or must end; the message is one sentence with the reason."""

    message: str


Observed = list[tuple[float, str]]
"""Observations since the last message, each with the value of the metric's label."""


class Stats(msgspec.Struct, array_like=True):
    """Statistics of the core.

    Annotated fields are metrics: a gauge is a current value, a counter is a total, and observations
    of a histogram are sent once.

    `tokens` counts generated tokens. `computed_tokens` counts tokens run through the model.
    `prefix_hit_tokens` counts tokens from the prefix cache, also for preempted requests.
    `full_step_seconds` estimates the longest duration of a step of the largest size.
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
    """Natural log probabilities at one position, from the model's own distribution, before bias,
    penalties, temperature and all other changes.

    The position's own token is first, then come the most likely ones, best first; the own token may
    be among them again. `rank` is its place among all tokens, 1 for the most likely.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class StepOutput(msgspec.Struct, tag="step", array_like=True):
    """The output of one step: one entry per request that got a token or ended.

    - `counts[i]` tokens of request `request_ids[i]` are adjacent in the flat `token_ids`.
    - `finish[i]`: a `Finish` value.
    - `stop_token[i]`: the id that ended the request, which is its last token, or -1.
    - `cached_tokens[i]`: number of prompt tokens from the prefix cache in the request's first
      entry, 0 in later ones.
    - `errors`: a sentence for each request ended by ERROR or INVALID; for NOT_FINITE, which numbers
      are not finite.
    - `logprobs`: by request id, one item per token of the entry; only if requested.
    - `prompt_logprobs`: with the first token of a request, one item per prompt token from the
      second on; only if requested.
    - `starts`: with the next entry of a request, each step in which it got a slot, and the time of
      its planning on the machine's monotonic clock: the first step, then one after each preemption;
      only if requested.
    - `pooled`: the result of a pooling request, which ends with STOP and without a token: float32,
      little-endian, row by row.
    - `device_seconds`: the device time of an ended request, its share of each step by its tokens
      there; with `stop_strings` also the time so far of a running one.
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
