"""Compute log probabilities from the model's own distribution, for rows that ask for them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.engine.cuda.staging import to_device
from workers.engine.messages.core import SamplingParams, TokenLogprobs
from workers.engine.sampling.rows import SampledRows


@dataclass(slots=True)
class Logprobs:
    """Log probabilities of A tokens, one per row: the token itself and the most likely ones, of
    which the request asked for `counts`.
    """

    token_ids: Tensor  # int32 [A, 1 + the largest count]
    logprobs: Tensor  # float32 [A, 1 + the largest count]
    ranks: Tensor  # int32 [A]
    counts: NDArray[np.int64]  # [A]

    def to_host(self) -> list[TokenLogprobs]:
        """Return one item per position; the tensors must be on the host."""
        columns = zip(
            self.token_ids.tolist(), self.logprobs.tolist(), self.ranks.tolist(), self.counts.tolist(), strict=True
        )
        return [TokenLogprobs(ids[: 1 + count], values[: 1 + count], rank) for ids, values, rank, count in columns]


@dataclass(slots=True)
class KeptLogits:
    """Logits of the rows that ask, kept before the other stages change them."""

    rows: NDArray[np.int64]  # [A]
    counts: NDArray[np.int64]  # [A]
    logits: Tensor  # float32 [A, vocab]

    def logprobs(self, tokens: Tensor) -> Logprobs:
        """Return the log probabilities for the step's drawn tokens [R]."""
        drawn = tokens[to_device(self.rows, tokens.device)].clamp(min=0)  # there may be none
        return token_logprobs(self.logits, drawn, self.counts)


class AskedLogprobs:
    """The number of log probabilities that the requests in `num_slots` slots ask for, besides each
    token's own; -1 for none at all.
    """

    def __init__(self, num_slots: int) -> None:
        self._counts = np.full(num_slots, -1, np.int64)

    def set(self, slot: int, params: SamplingParams) -> None:
        self._counts[slot] = params.logprobs

    def keep(self, logits: Tensor, rows: SampledRows) -> KeptLogits | None:
        counts = self._counts[rows.slots]
        asking = np.nonzero(counts >= 0)[0]
        if not asking.size:
            return None
        return KeptLogits(asking, counts[asking], logits[to_device(asking, logits.device)])


def token_logprobs(logits: Tensor, tokens: Tensor, counts: NDArray[np.int64]) -> Logprobs:
    """Return log probabilities for float32 logits [A, vocab] and int64 tokens [A].

    A count is capped at the size of the vocabulary. All values are NaN where a logit is NaN or
    infinity.
    """
    own = logits.gather(1, tokens[:, None])
    ranks = (logits > own).sum(-1) + 1
    best, best_ids = logits.topk(min(int(counts.max()), logits.shape[1]), -1)
    total = logits.logsumexp(-1, keepdim=True)
    values = torch.cat((own, best), 1) - torch.where(total.isfinite(), total, torch.nan)
    return Logprobs(torch.cat((tokens[:, None], best_ids), 1).int(), values, ranks.int(), counts)


def concatenated(parts: list[Logprobs]) -> Logprobs:
    """Return parts of equal width, concatenated."""
    if len(parts) == 1:
        return parts[0]
    return Logprobs(
        torch.cat([part.token_ids for part in parts]),
        torch.cat([part.logprobs for part in parts]),
        torch.cat([part.ranks for part in parts]),
        np.concatenate([part.counts for part in parts]),
    )
