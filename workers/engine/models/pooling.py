"""Compute the result of a pooling request from hidden states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.engine.layers.base import AttentionContext, Projection
from workers.engine.messages.core import PoolingParams
from workers.engine.models.base import DecoderModel, EncoderModel
from workers.engine.models.config import ModelConfig
from workers.engine.models.pooling_config import PoolingConfig

_OVER_LOGITS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "softmax": lambda logits: logits.softmax(-1),
    "none": lambda logits: logits,
}


class PoolingModel:
    """A model of hidden states, with the pooler that turns them into vectors or a classifier's
    numbers.
    """

    def __init__(self, config: ModelConfig, trunk: DecoderModel | EncoderModel, pooler: Pooler) -> None:
        self.config, self.pooler = config, pooler
        self.dtype, self.device = trunk.dtype, trunk.device
        self.position_bias = trunk.position_bias if isinstance(trunk, EncoderModel) else None
        self._trunk = trunk

    def forward(
        self, input_ids: Tensor, positions: Tensor, lengths: Tensor, types: Tensor | None, attend: AttentionContext
    ) -> Tensor:
        """Return hidden states [T, hidden] from int64 [T] inputs.

        `types` are the token types if any is not 0; a model without token types ignores them.
        """
        if isinstance(self._trunk, DecoderModel):
            return self._trunk.forward(input_ids, positions, lengths, attend)
        return self._trunk.forward(input_ids, positions, types, attend)


class Pooler:
    """Pool hidden states in float32.

    `transforms` are the projections after the pooling: dense modules, or a classification head.
    """

    def __init__(self, config: PoolingConfig, transforms: Sequence[Projection]) -> None:
        self._config = config
        self._transforms = transforms

    def pool(self, hidden: Tensor, counts: Tensor, last: Tensor, unpooled: Tensor | None = None) -> Tensor:
        """Return float32 [R, size * modes] from hidden states [T, size].

        `last` int64 [R] are the last tokens of the rows. Modes other than "last" need whole rows,
        of `counts` int64 [R] tokens; the first `unpooled` int64 [R] of these count only for "cls".
        None means that all tokens count.
        """
        ends, modes = _ends(counts, last), self._config.modes
        tokens = None if ends.keys() >= set(modes) else _whole_texts(hidden, counts, unpooled)
        return torch.cat(
            [hidden[ends[mode]].float() if tokens is None or mode in ends else tokens.reduce(mode) for mode in modes],
            -1,
        )

    def needed(self, counts: Tensor, last: Tensor) -> Tensor | None:
        """Return the tokens whose hidden states `pool` reads, in rising order, or None for all."""
        modes = self._config.modes
        return _ends(counts, last).get(modes[0]) if len(modes) == 1 else None

    def finish(self, pooled: Tensor, params: PoolingParams) -> Tensor:
        """Return the result of a request with these parameters, from its rows of `pool`."""
        for transform in self._transforms:
            pooled = transform(pooled)
        if params.task == "classify":
            return _OVER_LOGITS[self._config.activation](pooled) if params.activation else pooled
        return self.embedding(pooled, params)

    def embedding(self, vectors: Tensor, params: PoolingParams) -> Tensor:
        """Return vectors cut to their dimensions and normalized, each if requested."""
        vectors = vectors[:, : params.dimensions or None].float()
        normalize = self._config.normalize if params.normalize is None else params.normalize
        return F.normalize(vectors, dim=-1) if normalize else vectors


def _ends(counts: Tensor, last: Tensor) -> dict[str, Tensor]:
    """Return the token of each row that a mode reads, for modes that read a single token."""
    return {"cls": last + 1 - counts, "last": last}


@dataclass(slots=True)
class _WholeTexts:
    """The pooled tokens of several texts."""

    hidden: Tensor  # float32 [T, size]
    places: Tensor  # float32 [T, 1], each token's position in its text, from 1
    counts: Tensor  # int64 [R], tokens of each text, at least 1

    def reduce(self, mode: str) -> Tensor:
        if mode in ("mean", "max"):
            return torch.segment_reduce(self.hidden, mode, lengths=self.counts)
        if mode == "mean_sqrt_len":
            return self._sum(self.hidden) / self.counts.sqrt()[:, None]
        return self._sum(self.hidden * self.places) / self._sum(self.places)

    def _sum(self, values: Tensor) -> Tensor:
        return torch.segment_reduce(values, "sum", lengths=self.counts)


def _whole_texts(hidden: Tensor, counts: Tensor, unpooled: Tensor | None) -> _WholeTexts:
    """Return the texts in hidden states [T, size]; at least the last token of each is pooled."""
    number, before = len(hidden), counts.cumsum(0) - counts
    places = torch.arange(1, number + 1, device=hidden.device)
    places = places - torch.repeat_interleave(before, counts, output_size=number)
    if unpooled is not None:
        unpooled = torch.minimum(unpooled, counts - 1)
        kept = places > torch.repeat_interleave(unpooled, counts, output_size=number)
        hidden, places, counts = hidden[kept], places[kept], counts - unpooled
    return _WholeTexts(hidden.float(), places[:, None].float(), counts)
