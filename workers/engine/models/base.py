"""What the runner asks of a model, and the head that every family shares."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from workers.engine.attention import RotaryHeads
from workers.engine.models.config import ModelConfig
from workers.engine.weights import Weights


class AttentionContext(Protocol):
    """Attention of one step as the layers see it: the paged cache and the step's rows stand behind it."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, heads, d], k and v [T, kv_heads, d] -> [T, heads, d]; writes k and v to the cache first."""
        ...

    def rotary(self, layer: int, qkv: Tensor, rotary: RotaryHeads) -> Tensor:
        """The same from qkv [T, heads + 2 * kv_heads, d] whose queries and keys are yet to be normed and rotated."""
        ...


class DecoderModel(ABC):
    """A decoder over flat rows of tokens: no batch dimension, no padding."""

    #: What a bare decoder's tensor names lack in a full checkpoint; layers write it as "*."
    prefix: str

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.dtype = weights.dtype
        self.device = weights.device
        self.lm_head: Tensor  # [vocab, hidden]

    @abstractmethod
    def forward(self, input_ids: Tensor, positions: Tensor, lengths: Tensor, attend: AttentionContext) -> Tensor:
        """Hidden states [T, hidden] after the last norm, for input_ids, positions and lengths int64 [T].

        A token's length is the larger of its request's prompt length and its position + 1; only length-dependent RoPE reads it.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> float32 [R, vocab]."""
        return F.linear(hidden, self.lm_head).float()


def load_head(weights: Weights, config: ModelConfig, embedding: Tensor) -> Tensor:
    """The output projection [vocab, hidden]: the embedding itself where the two are tied."""
    if config.tie_word_embeddings:
        return embedding
    return weights.take("lm_head.weight", (config.vocab_size, config.hidden_size))
