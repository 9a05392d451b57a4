"""Define the interface of models for the runner, and the output head that every family shares."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch.nn.functional as F
from torch import Tensor

from workers.engine.layers.base import AttentionContext, Table
from workers.engine.layers.weights import Weights
from workers.engine.models.config import ModelConfig


class DecoderModel(ABC):
    """A decoder over flat rows of tokens: no batch dimension, no padding."""

    #: Whether a CUDA graph may record its forward, which then must neither wait for the device nor
    #: depend on host values except shapes.
    recordable = True

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.dtype = weights.dtype
        self.device = weights.device
        self.lm_head: Table  # [vocab, hidden], or this rank's rows of it
        self._parallel = weights.parallel

    @abstractmethod
    def forward(self, input_ids: Tensor, positions: Tensor, lengths: Tensor, attend: AttentionContext) -> Tensor:
        """Return hidden states [T, hidden] after the last norm, for int64 [T] input_ids, positions
        and lengths.

        A token's length is the larger of its request's prompt length and its position + 1; only
        length-dependent RoPE reads it.
        """

    def head(self, hidden: Tensor) -> Tensor:
        """Return `logits` in any float dtype, which saves a pass over them."""
        return self._finished(self.lm_head.logits(hidden)) if self._parallel.size == 1 else self.logits(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [R, vocab] for hidden states [R, hidden]."""
        return self._finished(self._parallel.gather_logits(self.lm_head.logits(hidden), self.config.vocab_size))

    def _finished(self, logits: Tensor) -> Tensor:
        """Return logits with the model's factor and soft cap."""
        factor, cap = self.config.logit_factor, self.config.logit_cap
        if factor != 1.0:
            logits = logits.mul_(factor)
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


class EncoderModel(ABC):
    """A model in which each token attends to both sides of its text; it also takes flat rows of
    tokens.
    """

    #: Added to the scores of queries and keys in all layers; see `Attention.forward`.
    position_bias: Tensor | None = None

    def __init__(self, weights: Weights) -> None:
        self.dtype, self.device = weights.dtype, weights.device

    @abstractmethod
    def forward(self, input_ids: Tensor, positions: Tensor, types: Tensor | None, attend: AttentionContext) -> Tensor:
        """Return hidden states [T, hidden] for int64 [T] input_ids, positions and token types (None
        if all are 0).
        """


class BiasedTable:
    """An output projection with a bias, which has no embeddings."""

    def __init__(self, table: Table, bias: Tensor) -> None:
        self.rows, self._table, self._bias = table.rows, table, bias

    def logits(self, hidden: Tensor) -> Tensor:
        return self._table.logits(hidden).add_(self._bias)


def load_tables(
    weights: Weights, config: ModelConfig, embedding: str, head: str = "lm_head", bias: bool = False
) -> tuple[Table, Table]:
    """Return the embedding of that name [vocab, hidden], and this rank's rows of the output
    projection `head`, with a `bias` if the family has one.

    Every rank's part is padded to the same number of rows. Tied weights use rows of the embedding;
    a single rank shares the whole table.
    """
    vocab, hidden = config.vocab_size, config.hidden_size
    own, most = weights.parallel.part(vocab), weights.parallel.part_size(vocab)
    table = weights.ops.table(weights.take_table(embedding, vocab, hidden))
    output, missing = table, most - own.length
    if not config.tie_word_embeddings or own.length < vocab:
        rows = weights.take_table(embedding if config.tie_word_embeddings else f"{head}.weight", vocab, hidden, own)
        output = weights.ops.table(rows.padded(missing) if missing else rows)
    if bias:
        output = BiasedTable(output, F.pad(weights.take_rows([f"{head}.bias"], [own]), (0, missing)))
    return table, output
