"""The arithmetic of a workload on a model, in any engine: operations of the matrix products, and
bytes that a step reads.

The head counts for sampled rows only; tokens from the prefix cache do not count.
Attention's own products are left out: they are few at these contexts, and counting them would
flatter the share of the peak.
"""

from dataclasses import dataclass
from typing import Any

from benchmarks.models import SHAPES, VOCABULARY_SIZE

_ITEM_BYTES = 2  # of each weight, key and value: the files of `SHAPES` are in bfloat16, and the engine keeps them so


@dataclass(frozen=True, slots=True)
class Shape:
    """Elements of a model's matrices, and its attention."""

    layer_weights: int  # of all layers together
    head_weights: int
    layers: int
    kv_width: int  # of keys, or of values, of one layer

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_width * _ITEM_BYTES

    @property
    def weight_bytes(self) -> int:
        return (self.layer_weights + self.head_weights) * _ITEM_BYTES

    def operations(self, computed_tokens: int, sampled_rows: int) -> int:
        """Return the number of multiplications and additions of the matrix products."""
        return 2 * (computed_tokens * self.layer_weights + sampled_rows * self.head_weights)


def shape_of(model: str) -> Shape:
    """Return the shape of one of `SHAPES`."""
    settings = SHAPES[model]
    vocabulary = settings.get("vocab_size", VOCABULARY_SIZE)
    if settings["model_type"] == "gpt2":
        hidden, layers = settings["n_embd"], settings["n_layer"]
        return Shape(12 * hidden * hidden * layers, hidden * vocabulary, layers, hidden)
    hidden, layers, heads = settings["hidden_size"], settings["num_hidden_layers"], settings["num_attention_heads"]
    dim = settings.get("head_dim", hidden // heads)
    kv = settings["num_key_value_heads"] * dim
    layer = hidden * (2 * heads * dim + 2 * kv) + 3 * hidden * settings["intermediate_size"]
    return Shape(layer * layers, hidden * vocabulary, layers, kv)


def share_of(figures: dict[str, Any], peak: float, model: str) -> float:
    """Return a pass's share of the matrix peak (operations per second)."""
    operations = shape_of(model).operations(figures["computed_tokens"], figures["output_tokens"])
    return operations / figures["seconds"] / peak
