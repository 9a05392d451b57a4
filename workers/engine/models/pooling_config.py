"""Define the pooling settings of a model, from config.json or a sentence-transformers folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MODES = ("cls", "max", "mean", "mean_sqrt_len", "weightedmean", "last")
"""Pooling modes: the first token, the maximum or mean of all tokens, their sum divided by the
square root of their number, their mean weighted by 1, 2, 3 and so on, or the last token.
"""


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """A projection of pooled vectors, whose tensors are in a separate folder."""

    folder: Path
    size_in: int
    size_out: int
    bias: bool
    activation: str | None  # a name in `models.head`, or None


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """The steps from hidden states to one vector or a classifier's numbers.

    The vectors of `modes` are concatenated. Then follow `dense` in order and a normalization, or
    the family's classification head, with `activation` over its logits.
    """

    modes: tuple[str, ...]  # from MODES
    normalize: bool = False
    dense: tuple[DenseConfig, ...] = ()
    sizes: tuple[int, ...] = ()  # allowed sizes of truncated vectors (matryoshka)
    any_size: bool = False
    labels: tuple[str, ...] = ()  # of a classifier
    activation: str = ""  # of a classifier: sigmoid, softmax or none
