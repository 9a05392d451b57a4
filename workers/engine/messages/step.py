"""The plan of one step, from the scheduler to the model runner, and its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from workers.engine.messages.core import PoolingParams, SamplingParams, TokenLogprobs


@dataclass(slots=True)
class AddedRequest:
    """A request that gets `slot` before the step runs; it overwrites the slot's whole state."""

    slot: int
    token_ids: list[int]  # prompt and output so far: all known tokens
    prompt_length: int
    sampling: SamplingParams
    pooling: PoolingParams | None = None
    second_text: int = 0


@dataclass(slots=True)
class NewBlocks:
    """Blocks appended to a slot's block table of a group before the step runs.

    A block has the tokens of the grid. Its pages are ordered by column, then by position. In a
    model of one group it is a page.
    """

    slot: int
    first: int  # index in the slot's block table of the first of the blocks
    block_ids: list[int]  # pages of these blocks, as many for each as the group has in a block
    group: int = 0


@dataclass(slots=True)
class PromptScores:
    """Prompt tokens whose log probabilities a step reports.

    They are at positions `first` to `last` - 1 of the request in row `row`.
    """

    row: int
    first: int
    last: int


@dataclass(slots=True)
class StepPlan:
    """One step: `counts[i]` tokens of slot `slots[i]` from position `starts[i]` on, for N rows.

    A row samples after each of its last `samples[i]` tokens: none if it ends before its request's
    last known token, else one, at position `starts[i] + counts[i]`. More samples are for rows that
    end with draft tokens. `TokenMasks` arrive before the samples `guided` are drawn. A pooling
    request is pooled in the step in which other requests would sample.
    """

    step: int
    added: list[AddedRequest]
    new_blocks: list[NewBlocks]
    slots: NDArray[np.int32]  # [N]
    starts: NDArray[np.int32]  # [N] tokens computed before
    counts: NDArray[np.int32]  # [N] tokens computed now, at least 1
    samples: NDArray[np.int32]  # [N] tokens sampled, at most `counts`
    prompt_scores: list[PromptScores] = field(default_factory=list)
    guided: list[int] = field(default_factory=list)  # indices of the step's samples with a guide

    def sampled(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return each sample's row, and the number of later samples of that row; both [R]."""
        rows = np.repeat(np.arange(len(self.samples)), self.samples)
        if len(rows) == np.count_nonzero(self.samples):
            return rows, np.zeros_like(rows)
        return rows, np.cumsum(self.samples)[rows] - np.arange(1, len(rows) + 1)


@dataclass(slots=True)
class TokenMasks:
    """The tokens that may be drawn, for K of a step's samples; other samples may draw any token.

    Bit `t % 32` of a mask's word `t // 32` is for token t; bits after the vocabulary's last token
    are ignored.
    """

    rows: NDArray[np.int64]  # [K], of the step's samples
    masks: NDArray[np.int32]  # [K, vocab / 32, rounded up]


MakeMasks = Callable[[], TokenMasks]
"""Function that is called after the model's part of a step is launched, before the draw."""

NO_TOKEN = -1
"""In the place of a token: the row's parameters and mask leave none."""

NOT_FINITE = -2
"""In the place of a token: a logit is NaN or infinite."""

NO_MASKS = TokenMasks(np.zeros(0, np.int64), np.zeros((0, 0), np.int32))


@dataclass(slots=True)
class StepResult:
    """The result of one step on the host, with log probabilities if requested.

    A model that pools returns no tokens, but float32 numbers. Where numbers are not finite, log
    probabilities are NaN.
    """

    # `samples[i]` of row i, row after row; may be NO_TOKEN or NOT_FINITE
    tokens: NDArray[np.int32]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by index in `tokens`
    # In the order of the plan's `prompt_scores`
    prompt_logprobs: list[list[TokenLogprobs]] = field(default_factory=list)
    pooled: list[bytes] = field(default_factory=list)  # empty where a number is not finite
