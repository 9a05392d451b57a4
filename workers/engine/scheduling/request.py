"""Hold the scheduler's state of one request."""

import sys
from collections.abc import Collection, Set
from itertools import chain

from workers.engine.guides.guide import Guide
from workers.engine.messages.core import EngineRequest, Finish, SamplingParams, TokenLogprobs
from workers.engine.scheduling.prefix_tree import BlockRun, PrefixNode

_POOLING = SamplingParams(max_tokens=1)
"""The sampling parameters of a pooling request."""


class RequestState:
    """A request's tokens, slot and blocks.

    It has three token counts. `computed` counts tokens whose keys and values are in the cache, or
    will be after the launched steps. `known` counts tokens on the device: the host's tokens and
    those that launched steps are about to sample. `len(tokens)` counts tokens that the host has
    received. `computed` is at most `known`, and `known - len(tokens)` launched, not yet retired
    steps sample for this request.
    """

    __slots__ = (
        "arrived",
        "batch_id",
        "block_hashes",
        "blocks",
        "branch",
        "cached_tokens",
        "call",
        "capacity",
        "computed",
        "device_seconds",
        "entered",
        "finish",
        "guide",
        "hash_at",
        "held",
        "id",
        "known",
        "last_step",
        "limit",
        "live",
        "next_score",
        "pages_held",
        "place",
        "pooling",
        "postponed",
        "priority",
        "prompt_length",
        "rank",
        "reached",
        "release_at",
        "retained",
        "runs",
        "sampling",
        "second_text",
        "shared",
        "shared_border",
        "slot",
        "stop_strings",
        "stop_token_ids",
        "tenant",
        "timed",
        "tokens",
        "waited",
        "weight",
    )

    def __init__(self, request: EngineRequest, arrival: int, max_model_len: int, eos_token_ids: Set[int]) -> None:
        """`arrival` orders equals in priority; `max_model_len` caps prompt and output together."""
        sampling = request.sampling if request.pooling is None else _POOLING
        self.id = request.request_id
        self.tokens = request.prompt_token_ids + request.output_token_ids
        self.prompt_length = len(request.prompt_token_ids)
        self.sampling = sampling
        self.live = request.live
        self.arrived = request.arrived
        self.timed = request.timed
        self.waited = 0.0  # seconds from its arrival to its first step
        self.device_seconds = 0.0  # its share of step times, as far as `SlotPool` has added it
        share = request.share
        self.tenant, self.weight = ("", 1.0) if share is None else (share.tenant, share.weight)
        self.call: str | int = self.id if share is None else share.call
        self.rank = (request.priority, arrival)
        self.set_place(0.0)
        # The first prompt position whose log probability no launched step reports; beyond all
        # positions if none is left.
        self.next_score = 1 if sampling.prompt_logprobs >= 0 and self.prompt_length > 1 else sys.maxsize
        self.pooling = request.pooling
        self.second_text = request.second_text
        # A pooling request ends at the token that others sample first, even beyond the context
        most = max_model_len if request.pooling is None else sys.maxsize
        self.limit = min(self.prompt_length + sampling.max_tokens, most)
        stops = frozenset(sampling.stop_token_ids)
        self.stop_token_ids: Set[int] = stops if sampling.ignore_eos else stops | eos_token_ids
        # The batch whose outputs predict the length of its own; None if only its limit can end it
        self.batch_id = request.batch_id if self.stop_token_ids or request.stop_strings else None
        self.stop_strings = request.stop_strings
        self.finish = Finish.RUNNING
        self.guide: Guide | None = None
        self.held = False  # until its guide is ready
        # A token that its guide has not considered yet, with its log probabilities
        self.postponed: tuple[int, list[TokenLogprobs] | None] | None = None
        self.cached_tokens = -1
        self.block_hashes: list[bytes] = []
        self.known = len(self.tokens)
        self.reached = 0  # most tokens computed before it lost its slot
        self.retained = 0  # number of `block_hashes` retained while it waits
        self.leave()

    def set_place(self, place: float) -> None:
        """Set the place among live requests (`live_shares.py`), and with it the priority."""
        self.place = place
        self.priority = (not self.live, place, *self.rank)

    def leave(self) -> None:
        """Clear slot and blocks; keep the tokens.

        `known` still counts a token that a launched step is about to sample.
        """
        self.slot = -1
        self.blocks: list[int] = []  # in a cache of one group
        self.runs: list[BlockRun] = []  # by group, in a cache of several
        self.pages_held = 0
        self.capacity = 0
        # Pages of its first blocks that came from other requests, or are known to be shared
        self.shared = 0
        self.entered = -1  # the first step with its slot
        # Least number of computed tokens with which old blocks may be freed
        self.release_at = sys.maxsize
        # Number of blocks up to the border where its tokens and those of cached prefixes part
        self.branch = 0
        # The last border that it shares with cached prefixes or waiting requests
        self.shared_border: PrefixNode | None = None
        self.computed = 0
        self.hash_at = 0
        self.last_step = -1

    def ended_by(self) -> tuple[Finish, int]:
        """Return how the last token ends the request, and the token if it is a stop token, else -1.

        Among the first `min_tokens`, no token is a stop token.
        """
        if len(self.tokens) > self.prompt_length + self.sampling.min_tokens and self.tokens[-1] in self.stop_token_ids:
            return Finish.STOP, self.tokens[-1]
        if len(self.tokens) >= self.limit:
            return Finish.LENGTH, -1
        return Finish.RUNNING, -1


def refusal(request: RequestState, max_model_len: int, vocab_size: int, tasks: Collection[str]) -> str:
    """Return the reason why a request cannot run as a sentence, or "" if it can."""
    task = request.pooling.task if request.pooling is not None else "generate"
    if task not in tasks:
        return f"the model's tasks are {', '.join(tasks)}, and the request is for {task!r}"
    if not request.prompt_length:
        return "the prompt has no tokens"
    if request.pooling is not None:
        if request.prompt_length > max_model_len:
            return f"the text has {request.prompt_length} tokens, and the model takes {max_model_len}"
    elif request.prompt_length >= max_model_len:
        return (
            f"the prompt has {request.prompt_length} tokens; with one more for the answer the context holds"
            f" {max_model_len}"
        )
    low, high = min(request.tokens), max(request.tokens)
    if low < 0 or high >= vocab_size:
        return f"token id {low if low < 0 else high} is outside the vocabulary of {vocab_size}"
    sampling = request.sampling
    for name, named in (
        ("logit_bias", [token for token, _ in sampling.logit_bias]),
        ("bad_words", chain(*sampling.bad_words)),
    ):
        high = max(named, default=0)
        if high >= vocab_size:
            return f"token id {high} in {name} is outside the vocabulary of {vocab_size}"
    return ""
