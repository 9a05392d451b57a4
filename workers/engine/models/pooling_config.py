"""What becomes of a model's hidden states where it pools: the settings, from config.json or a
folder of sentence-transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MODES = ("cls", "max", "mean", "mean_sqrt_len", "weightedmean", "last")
"""What becomes a vector: the first token's, the maximum or mean of all, their sum by the square
root of their number, their mean weighted by 1, 2, 3 and so on, or the last token's.
"""


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """A projection of pooled vectors, with its tensors in a folder of its own."""

    folder: Path
    size_in: int
    size_out: int
    bias: bool
    activation: str | None  # a name of `models.head`; None for none


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """How hidden states become one vector: those of `modes` side by side, then `dense` after each
    other and a normalization, or the classification head of the model's family, and `activation`
    over its logits.
    """

    modes: tuple[str, ...]  # of MODES
    normalize: bool = False
    dense: tuple[DenseConfig, ...] = ()
    sizes: tuple[int, ...] = ()  # matryoshka's: to which a vector may be cut
    any_size: bool = False
    labels: tuple[str, ...] = ()  # of a classifier
    activation: str = ""  # of a classifier: sigmoid, softmax or none
