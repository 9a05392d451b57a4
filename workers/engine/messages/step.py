"""What the scheduler hands to the model runner for one step."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from workers.engine.messages.core import SamplingParams, TokenLogprobs


@dataclass(slots=True)
class AddedRequest:
    """A request that takes over `slot` before the step runs; the slot's whole earlier state is
    overwritten.
    """

    slot: int
    token_ids: list[int]  # prompt and output so far: every token that is known
    prompt_length: int
    sampling: SamplingParams


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

    A row samples when it ends at the last token that its request knows; the sampled token gets
    position `starts[i] + counts[i]`.
    """

    step: int
    added: list[AddedRequest]
    new_blocks: list[NewBlocks]
    slots: NDArray[np.int32]  # [N]
    starts: NDArray[np.int32]  # [N] tokens computed before
    counts: NDArray[np.int32]  # [N] tokens computed now, at least 1
    samples: NDArray[np.bool_]  # [N]
    prompt_scores: list[PromptScores] = field(default_factory=list)


@dataclass(slots=True)
class StepResult:
    """What came of one step, on the host. Log probabilities only where requested."""

    tokens: NDArray[np.int32]  # one per row that samples, in row order
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by index in `tokens`
    # As the plan's `prompt_scores`
    prompt_logprobs: list[list[TokenLogprobs]] = field(default_factory=list)
