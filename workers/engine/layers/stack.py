"""A decoder's layers one after the other: the residual stream through norm, attention, norm and
MLP.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from workers.engine.layers.base import AttentionContext, DecoderLayer, Norm, RotaryHeads, Rotation


class LayerStack:
    """`heads` of queries and `kv_heads` of keys and of values, of `head_dim` numbers each, in every
    layer; `norm` comes last.
    """

    def __init__(self, layers: Sequence[DecoderLayer], norm: Norm, heads: int, kv_heads: int, head_dim: int) -> None:
        self.layers, self.norm = layers, norm
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim

    def __call__(self, hidden: Tensor, rotation: Rotation | None, attend: AttentionContext) -> Tensor:
        """[T, hidden] from embeddings [T, hidden], which are used up; what it returns may be used
        up by the next call.
        """
        residual: Tensor | None = None
        for index, layer in enumerate(self.layers):
            x, residual = (
                (layer.attention_norm(hidden), hidden)
                if residual is None
                else layer.attention_norm.add(hidden, residual)
            )
            x, residual = layer.mlp_norm.add(
                layer.output(self._attend(index, layer, layer.qkv(x), rotation, attend)), residual
            )
            hidden = layer.down(layer.up(x))
        return self.norm(hidden) if residual is None else self.norm.add(hidden, residual)[0]

    def _attend(
        self, index: int, layer: DecoderLayer, qkv: Tensor, rotation: Rotation | None, attend: AttentionContext
    ) -> Tensor:
        heads = qkv.view(-1, self.heads + 2 * self.kv_heads, self.head_dim)
        if rotation is None:
            attended = attend(index, *heads.tensor_split([self.heads, self.heads + self.kv_heads], 1))
        else:
            attended = attend.rotary(index, heads, RotaryHeads(*rotation, layer.query_norm, layer.key_norm))
        return attended.flatten(1)
