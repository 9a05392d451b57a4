"""Run layers in sequence: the residual stream through attention and MLP, with a norm before or
after each.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from workers.engine.layers.base import AttentionContext, DecoderLayer, Norm, RotaryHeads, Rotation


class LayerStack:
    """A sequence of layers.

    Every layer has `heads` of queries and `kv_heads` of keys and of values, with `head_dim` numbers
    each. `norm`, if any, comes last. A layer's norms apply to the inputs of its parts or, in a
    `post_norm` stack such as BERT's, to the sums x + part(x).
    """

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        norm: Norm | None,
        heads: int,
        kv_heads: int,
        head_dim: int,
        post_norm: bool = False,
    ) -> None:
        self.layers, self.norm, self.post_norm = layers, norm, post_norm
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim

    def __call__(self, hidden: Tensor, rotations: Sequence[Rotation], attend: AttentionContext) -> Tensor:
        """Return [T, hidden] from embeddings [T, hidden], which may be overwritten.

        The next call may overwrite the result.
        """
        run = self._run_post_norm if self.post_norm else self._run_pre_norm
        return run(hidden, rotations, attend)

    def _run_pre_norm(self, hidden: Tensor, rotations: Sequence[Rotation], attend: AttentionContext) -> Tensor:
        residual: Tensor | None = None
        for index, layer in enumerate(self.layers):
            x, residual = _normed(layer.attention_norm, hidden, residual)
            x, residual = layer.mlp_norm.add(self._attend(index, layer, x, rotations, attend), residual)
            hidden = layer.down(layer.up(x))
        return _normed(self.norm, hidden, residual)[0]

    def _run_post_norm(self, hidden: Tensor, rotations: Sequence[Rotation], attend: AttentionContext) -> Tensor:
        for index, layer in enumerate(self.layers):
            hidden = _normed(layer.attention_norm, self._attend(index, layer, hidden, rotations, attend), hidden)[0]
            hidden = layer.mlp_norm.add(layer.down(layer.up(hidden)), hidden)[0]
        return _normed(self.norm, hidden, None)[0]

    def _attend(
        self, index: int, layer: DecoderLayer, x: Tensor, rotations: Sequence[Rotation], attend: AttentionContext
    ) -> Tensor:
        heads = layer.qkv(x).view(-1, self.heads + 2 * self.kv_heads, self.head_dim)
        if rotations:
            rotary = RotaryHeads(*rotations[layer.rotation], layer.query_norm, layer.key_norm)
            attended = attend.rotary(index, heads, rotary)
        else:
            attended = attend(index, *heads.tensor_split([self.heads, self.heads + self.kv_heads], 1))
        return layer.output(attended.flatten(1))


def _normed(norm: Norm | None, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the norm of x, or of x + residual, and the input of the norm."""
    if norm is None:
        total = x if residual is None else x.add_(residual)
        return total, total
    return (norm(x), x) if residual is None else norm.add(x, residual)
