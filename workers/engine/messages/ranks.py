"""Messages from rank 0 of a replica to the other ranks, as msgspec structs.

Rank 0 sends one `RankSetup`, then one `PlanFrame` per step, followed by a `MaskFrame` if the step
has guided samples. A rank answers only with a `RankFailed`, the reason for its imminent end.
"""

from __future__ import annotations

import msgspec
import numpy as np

from workers.engine.messages.resolved_config import ResolvedConfig
from workers.engine.messages.step import AddedRequest, NewBlocks, PromptScores, StepPlan, TokenMasks


class RankSetup(msgspec.Struct):
    """`config` names the rank's own device; the ranks meet at `port` of the
    loopback interface.
    """

    config: ResolvedConfig
    rank: int
    port: int


class RankFailed(msgspec.Struct):
    message: str


class PlanFrame(msgspec.Struct, array_like=True):
    """A `StepPlan` with its arrays as bytes."""

    step: int
    added: list[AddedRequest]
    new_blocks: list[NewBlocks]
    slots: bytes
    starts: bytes
    counts: bytes
    samples: bytes
    prompt_scores: list[PromptScores]
    guided: list[int]

    @classmethod
    def of(cls, plan: StepPlan) -> PlanFrame:
        slots, starts, counts, samples = (
            array.tobytes() for array in (plan.slots, plan.starts, plan.counts, plan.samples)
        )
        return cls(
            plan.step, plan.added, plan.new_blocks, slots, starts, counts, samples, plan.prompt_scores, plan.guided
        )

    def plan(self) -> StepPlan:
        slots, starts, counts, samples = (
            np.frombuffer(array, np.int32).copy() for array in (self.slots, self.starts, self.counts, self.samples)
        )
        return StepPlan(
            self.step, self.added, self.new_blocks, slots, starts, counts, samples, self.prompt_scores, self.guided
        )


class MaskFrame(msgspec.Struct, array_like=True):
    """`TokenMasks` with their arrays as bytes."""

    rows: bytes
    masks: bytes

    @classmethod
    def of(cls, masks: TokenMasks) -> MaskFrame:
        return cls(masks.rows.tobytes(), masks.masks.tobytes())

    def token_masks(self) -> TokenMasks:
        rows = np.frombuffer(self.rows, np.int64).copy()
        words = len(self.masks) // np.int32().itemsize // max(1, len(rows))
        return TokenMasks(rows, np.frombuffer(self.masks, np.int32).reshape(len(rows), words).copy())
