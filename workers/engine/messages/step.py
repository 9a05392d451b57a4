"""What the scheduler hands to the model runner for one step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from workers.engine.messages.core import PoolingParams, SamplingParams, TokenLogprobs


@dataclass(slots=True)
class AddedRequest:
    """A request that takes over `slot` before the step runs; the slot's whole earlier state is
    overwritten.
    """

    slot: int
    token_ids: list[int]  # prompt and output so far: every token that is known
    prompt_length: int
    sampling: SamplingParams
    pooling: PoolingParams | None = None
    second_text: int = 0


@dataclass(slots=True)
class NewBlocks:
    """Blocks appended to a slot's block table before the step runs."""

    slot: int
    first: int  # index in the slot's block table of the first of `block_ids`
    block_ids: list[int]


@dataclass(slots=True)
class PromptScores:
    """Prompt tokens whose log probabilities a step reports.

    They are positions `first` to `last` - 1 of row `row`'s request.
    """

    row: int
    first: int
    last: int


@dataclass(slots=True)
class StepPlan:
    """One step: `counts[i]` tokens of slot `slots[i]` from position `starts[i]` on, for N rows.

    A row samples after each of its last `samples[i]` tokens: none where it ends before the last
    token that its request knows, else one, at position `starts[i] + counts[i]`. More would be those
    of a row that ends with drafts. Before the samples `guided` are drawn, `TokenMasks` come.
    Pooling requests are pooled where others sample.
    """

    step: int
    added: list[AddedRequest]
    new_blocks: list[NewBlocks]
    slots: NDArray[np.int32]  # [N]
    starts: NDArray[np.int32]  # [N] tokens computed before
    counts: NDArray[np.int32]  # [N] tokens computed now, at least 1
    samples: NDArray[np.int32]  # [N] tokens sampled, at most `counts`
    prompt_scores: list[PromptScores] = field(default_factory=list)
    guided: list[int] = field(default_factory=list)  # those of the step's samples that a guide looks at

    def sampled(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return each sample's row, and how many of the row's samples come after it; both [R]."""
        rows = np.repeat(np.arange(len(self.samples)), self.samples)
        if len(rows) == np.count_nonzero(self.samples):
            return rows, np.zeros_like(rows)
        return rows, np.cumsum(self.samples)[rows] - np.arange(1, len(rows) + 1)


@dataclass(slots=True)
class TokenMasks:
    """Which tokens may be drawn, for K of a step's samples; the others may draw any.

    Bit `t % 32` of a mask's word `t // 32` is token t's; those behind the vocabulary's last token
    have no meaning.
    """

    rows: NDArray[np.int64]  # [K], of the step's samples
    masks: NDArray[np.int32]  # [K, vocab / 32, rounded up]


MakeMasks = Callable[[], TokenMasks]
"""Called once the model's work of a step is launched, before the step's tokens are drawn."""

NO_MASKS = TokenMasks(np.zeros(0, np.int64), np.zeros((0, 0), np.int32))


@dataclass(slots=True)
class StepResult:
    """What came of one step, on the host. Log probabilities only where requested.

    A token is -1 where a mask and what else the request asks for leave none. A model that pools
    gives no tokens, but float32 numbers in their places.
    """

    tokens: NDArray[np.int32]  # `samples[i]` of row i, one row behind another
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by index in `tokens`
    # As the plan's `prompt_scores`
    prompt_logprobs: list[list[TokenLogprobs]] = field(default_factory=list)
    pooled: list[bytes] = field(default_factory=list)
