"""Run layers in sequence: the residual stream through attention and MLP, with norms before or after
each.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from workers.engine.layers.base import AttentionContext, AttentionPart, DecoderLayer, Norm, RotaryHeads, Rotation


class LayerStack:
    """A sequence of layers.

    `norm`, if any, comes last. A layer's norms apply to the inputs of its parts or, in a
    `post_norm` stack such as BERT's, to the sums x + part(x).
    """

    def __init__(self, layers: Sequence[DecoderLayer], norm: Norm | None, post_norm: bool = False) -> None:
        self.layers, self.norm, self.post_norm = layers, norm, post_norm

    def __call__(
        self, hidden: Tensor, rotations: Sequence[Rotation], attend: AttentionContext, inputs: Tensor | None = None
    ) -> Tensor:
        """Return [T, hidden] from embeddings [T, hidden], which may be overwritten.

        The next call may overwrite the result.
        """
        if self.post_norm:
            return self._run_post_norm(hidden, rotations, attend)
        return self._run_pre_norm(hidden, rotations, attend, inputs)

    def _run_pre_norm(
        self, hidden: Tensor, rotations: Sequence[Rotation], attend: AttentionContext, inputs: Tensor | None
    ) -> Tensor:
        residual: Tensor | None = None
        for index in range(len(self.layers)):
            hidden, residual = self._run_layer(index, hidden, residual, rotations, attend, inputs)
        return self._last_norm(hidden, residual)

    def _last_norm(self, hidden: Tensor, residual: Tensor | None) -> Tensor:
        return _normed(self.norm, hidden, residual)[0]

    def _run_layer(
        self,
        index: int,
        hidden: Tensor,
        residual: Tensor | None,
        rotations: Sequence[Rotation],
        attend: AttentionContext,
        inputs: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the MLP's result, and the residual to which it is to be added, or None for none.

        `hidden` and `residual` are those of the layer before, and may be overwritten.
        """
        layer = self.layers[index]
        x, residual = _normed(layer.attention_norm, hidden, residual)
        attended = _result(layer, layer.attention_result_norm, _attend(index, layer.attention, x, rotations, attend))
        if layer.parallel:
            x = x if layer.mlp_norm is None else layer.mlp_norm(residual)
            residual = attended.add_(residual)
        else:
            x, residual = _normed(layer.mlp_norm, attended, residual)
        hidden = _result(layer, layer.mlp_result_norm, layer.mlp.down(layer.mlp.up(x)))
        if layer.layer_input is None and layer.scalar is None:
            return hidden, residual
        return _finished(layer, hidden.add_(residual), None if inputs is None else inputs[:, index]), None

    def _run_post_norm(self, hidden: Tensor, rotations: Sequence[Rotation], attend: AttentionContext) -> Tensor:
        for index, layer in enumerate(self.layers):
            attended = _attend(index, layer.attention, hidden, rotations, attend)
            hidden = _normed(layer.attention_norm, attended, hidden)[0]
            hidden = _normed(layer.mlp_norm, layer.mlp.down(layer.mlp.up(hidden)), hidden)[0]
        return _normed(self.norm, hidden, None)[0]


def _attend(
    index: int, part: AttentionPart, x: Tensor, rotations: Sequence[Rotation], attend: AttentionContext
) -> Tensor:
    shape = part.shape
    qkv, stored = part.qkv(x), shape.kv_heads if shape.reads is None else 0
    if part.row_norm is not None:
        part.row_norm(qkv)
    heads = qkv.view(-1, shape.heads + 2 * stored, shape.head_dim)
    if part.value_norm is not None:
        values = heads[:, shape.heads + stored :]
        values.copy_(part.value_norm(values))
    if rotations:
        rotary = RotaryHeads(*rotations[part.rotation], part.query_norm, part.key_norm, part.norm_after_rotation)
        attended = attend.rotary(index, heads, rotary, part.sinks)
    else:
        q, k, v = heads.tensor_split([shape.heads, shape.heads + stored], 1)
        attended = attend(index, q, k if stored else None, v if stored else None, part.sinks)
    return part.output(attended.flatten(1))


def _result(layer: DecoderLayer, norm: Norm | None, x: Tensor) -> Tensor:
    """Return a part's result as it is added."""
    if norm is not None:
        x = norm(x)
    return x if layer.factor == 1.0 else x.mul_(layer.factor)


def _finished(layer: DecoderLayer, x: Tensor, own: Tensor | None) -> Tensor:
    """Return a layer's result from the sum x and the layer's own input [T, size]."""
    part = layer.layer_input
    if part is not None:
        assert own is not None
        x = part.norm(part.projection(part.gate(x).mul_(own))).add_(x)
    return x if layer.scalar is None else x.mul_(layer.scalar)


def _normed(norm: Norm | None, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the norm of x, or of x + residual, and the input of the norm."""
    if norm is None:
        total = x if residual is None else x.add_(residual)
        return total, total
    return (norm(x), x) if residual is None else norm.add(x, residual)
