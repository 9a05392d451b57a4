"""From hidden states to what a pooling request yields."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
    """A model of hidden states, and what makes vectors or a classifier's numbers of them."""

    def __init__(self, config: ModelConfig, trunk: DecoderModel | EncoderModel, pooler: Pooler) -> None:
        self.config, self.pooler = config, pooler
        self.dtype, self.device = trunk.dtype, trunk.device
        self.position_bias = trunk.position_bias if isinstance(trunk, EncoderModel) else None
        self._trunk = trunk

    def forward(
        self, input_ids: Tensor, positions: Tensor, lengths: Tensor, types: Tensor | None, attend: AttentionContext
    ) -> Tensor:
        """Hidden states [T, hidden] from int64 [T] each; `types` are the token types where one is
        not 0, and without meaning for a model that has none.
        """
        if isinstance(self._trunk, DecoderModel):
            return self._trunk.forward(input_ids, positions, lengths, attend)
        return self._trunk.forward(input_ids, positions, types, attend)


class Pooler:
    """Pools in float32. `transforms` are the projections behind the pooling: dense modules, or a
    classification head.
    """

    def __init__(self, config: PoolingConfig, transforms: Sequence[Projection]) -> None:
        self._config = config
        self._transforms = transforms

    def pool(self, hidden: Tensor, counts: Tensor, last: Tensor) -> Tensor:
        """Return float32 [R, size * modes] from hidden states [T, size].

        The last tokens of the rows are `last` int64 [R]. Other modes than "last" are for rows that
        are whole, of `counts` int64 [R] tokens.
        """
        return torch.cat([self._pool(mode, hidden, counts, last) for mode in self._config.modes], -1)

    def finish(self, pooled: Tensor, params: PoolingParams) -> Tensor:
        """Return what a request with these parameters yields, from its rows of `pool`."""
        for transform in self._transforms:
            pooled = transform(pooled)
        if params.task == "classify":
            return _OVER_LOGITS[self._config.activation](pooled) if params.activation else pooled
        return self.embedding(pooled, params)

    def embedding(self, vectors: Tensor, params: PoolingParams) -> Tensor:
        """Return vectors cut to their dimensions, then normalized, where either is asked for."""
        vectors = vectors[:, : params.dimensions or None].float()
        normalize = self._config.normalize if params.normalize is None else params.normalize
        return F.normalize(vectors, dim=-1) if normalize else vectors

    def _pool(self, mode: str, hidden: Tensor, counts: Tensor, last: Tensor) -> Tensor:
        if mode == "last":
            return hidden[last].float()
        if mode == "cls":
            return hidden[last + 1 - counts].float()
        return torch.segment_reduce(hidden.float(), mode, lengths=counts)
