"""Build decoders with rotary positions from a list of layers and a family's words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from workers.engine.layers.base import (
    AttentionContext,
    AttentionPart,
    AttentionPattern,
    AttentionShape,
    DecoderLayer,
    HeadNorm,
    LayerInputPart,
    MlpPart,
    Norm,
    Projection,
    RowNorm,
)
from workers.engine.layers.heads import HeadRows, rotary_order, separate
from workers.engine.layers.linear import load_fused, load_gated, load_row_parallel, load_xielu
from workers.engine.layers.norm import HeadLayerNorm, LayerNorm, RMSNorm, RowRMSNorm, UnweightedNorm
from workers.engine.layers.parallel import Shard
from workers.engine.layers.rotary import NoRotation, Rotary
from workers.engine.layers.weights import Weights
from workers.engine.messages.errors import ModelLoadError
from workers.engine.models.base import DecoderModel, load_tables
from workers.engine.models.config import Json, ModelConfig, check_heads, optional, require, rope_config
from workers.engine.models.layer_inputs import LayerInputs, load_layer_input

HeadPlaces = Callable[[int, int, int], list[HeadRows]]
"""Place of queries, keys and values in their tensors, for heads, key-value heads and head size."""


@dataclass(frozen=True, slots=True)
class TensorNames:
    """The names of a family's tensors; those of layers follow the layer's index.

    Norms of results are None for families without them. Equal names stand for parts of one tensor.
    """

    layers: str = "*.layers"
    embedding: str = "*.embed_tokens"
    norm: str = "*.norm"
    head: str = "lm_head"
    queries: str = "self_attn.q_proj"
    keys: str = "self_attn.k_proj"
    values: str = "self_attn.v_proj"
    output: str = "self_attn.o_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    attention_norm: str | None = "input_layernorm"
    mlp_norm: str | None = "post_attention_layernorm"
    attention_result_norm: str | None = None
    mlp_result_norm: str | None = None


RESULT_NORMS = TensorNames(
    attention_norm=None,
    mlp_norm=None,
    attention_result_norm="post_attention_layernorm",
    mlp_result_norm="post_feedforward_layernorm",
)
"""Norms of what a layer's parts add, and none of their inputs."""

SANDWICH_NORMS = replace(RESULT_NORMS, attention_norm="input_layernorm", mlp_norm="pre_feedforward_layernorm")
"""Norms of both."""


@dataclass(frozen=True, slots=True)
class LayerInputSize:
    """The table of `LayerInputs`."""

    vocab_size: int
    size: int


@dataclass(frozen=True, slots=True)
class DecoderVariant:
    """The words in which families differ."""

    names: TensorNames = TensorNames()
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False  # of the output projection
    head_norm: bool = False  # a norm over each query and key head
    own_head_norms: bool = False  # a layer norm of each such head by its own weight
    norm_after_rotation: bool = False  # of heads
    row_norm: bool = False  # a norm over all query heads together, and over all key heads
    norm_offset: float = 0.0  # see `RMSNorm`
    layer_norm: bool = False  # layer norms in place of RMS norms
    norm_bias: bool = True  # of layer norms
    gated: bool = True  # whether MLPs have gates
    parallel: bool = False  # see `DecoderLayer`
    factor: float = 1.0  # of what a part adds
    interleaved: bool = False  # see `rotary_order`
    places: HeadPlaces = separate
    keys_as_values: tuple[int, ...] = ()  # layers whose values are their keys before norm and rotation
    value_norm: bool = False  # a norm without a weight over each value head
    mlp_sizes: tuple[int, ...] = ()  # by layer; empty if all have `intermediate_size`
    layer_scalars: bool = False
    layer_inputs: LayerInputSize | None = None
    rounded_factor: bool = False  # whether the embedding factor is rounded to the model's dtype


class RotaryDecoder(DecoderModel):
    def __init__(self, config: ModelConfig, variant: DecoderVariant, weights: Weights, max_model_len: int) -> None:
        super().__init__(config, weights)
        names = variant.names
        self.embedding, self.lm_head = load_tables(
            weights, config, f"{names.embedding}.weight", names.head, variant.head_bias
        )
        factor = config.embedding_factor
        self._factor = float(torch.tensor(factor, dtype=weights.dtype)) if variant.rounded_factor else factor
        inputs = variant.layer_inputs
        self.layer_inputs = None if inputs is None else LayerInputs(weights, config, inputs.vocab_size, inputs.size)
        self.rotations = [_rotation(config, index, weights, max_model_len) for index in range(len(config.ropes))]
        layers = [_LayerLoader(config, variant, weights, index).load() for index in range(len(config.layers))]
        self.stack = weights.ops.stack(layers, _load_norm(config, variant, weights, names.norm, config.hidden_size))

    def forward(self, input_ids: Tensor, positions: Tensor, lengths: Tensor, attend: AttentionContext) -> Tensor:
        hidden = self.embedding.rows(input_ids)
        if self._factor != 1.0:
            hidden.mul_(self._factor)
        if self.config.query_temperature is not None:
            attend = self.config.query_temperature.applied(positions, self.config.layers[0].heads, attend)
        inputs = None if self.layer_inputs is None else self.layer_inputs(input_ids, hidden)
        rotations = [rotation.cos_sin(positions, lengths) for rotation in self.rotations]
        return self.stack(hidden, rotations, attend, inputs)


def _rotation(config: ModelConfig, index: int, weights: Weights, max_model_len: int) -> Rotary | NoRotation:
    rope = config.ropes[index]
    layer = next((layer for layer in range(len(config.layers)) if config.rotation(layer) == index), 0)
    head_dim = config.layers[layer].head_dim
    if rope is None:
        return NoRotation(head_dim, weights.dtype, weights.device)
    return Rotary(rope, head_dim, max_model_len, weights.dtype, weights.device)


def _load_norm(config: ModelConfig, variant: DecoderVariant, weights: Weights, name: str, size: int) -> Norm:
    if variant.layer_norm:
        return LayerNorm(weights, name, size, config.norm_eps, variant.norm_bias, variant.norm_offset)
    return RMSNorm(weights, name, size, config.norm_eps, variant.norm_offset)


class _LayerLoader:
    """Load one layer."""

    def __init__(self, config: ModelConfig, variant: DecoderVariant, weights: Weights, index: int) -> None:
        self._config, self._variant, self._weights = config, variant, weights
        self._name, self._index, self._shape = f"{variant.names.layers}.{index}", index, config.layers[index]

    def load(self) -> DecoderLayer:
        names, variant = self._variant.names, self._variant
        return DecoderLayer(
            self._attention(),
            self._mlp(),
            self._norm(names.attention_norm),
            self._norm(names.mlp_norm),
            self._norm(names.attention_result_norm),
            self._norm(names.mlp_result_norm),
            variant.parallel,
            variant.factor,
            self._layer_input(),
            self._weights.take(f"{self._name}.layer_scalar", (1,)) if variant.layer_scalars else None,
        )

    def _layer_input(self) -> LayerInputPart | None:
        inputs = self._variant.layer_inputs
        return None if inputs is None else load_layer_input(self._weights, self._name, self._config, inputs.size)

    def _attention(self) -> AttentionPart:
        names, variant, weights, shape = self._variant.names, self._variant, self._weights, self._shape
        parallel, hidden = weights.parallel, self._config.hidden_size
        heads, kv_heads = shape.heads * parallel.size, shape.kv_heads * parallel.size // shape.kv_copies
        order = self._order()
        queries, keys, values = variant.places(heads, kv_heads, shape.head_dim)
        rows = [
            queries.on_rank(parallel, order=order),
            keys.on_rank(parallel, shape.kv_copies, order),
            values.on_rank(parallel, shape.kv_copies),
        ]
        values_name = names.keys if self._index in variant.keys_as_values else names.values
        tensors = [f"{self._name}.{name}" for name in (names.queries, names.keys, values_name)]
        parts, keeps = (3, True) if shape.reads is None else (1, False)
        return AttentionPart(
            shape,
            load_fused(weights, tensors[:parts], hidden, rows[:parts], variant.qkv_bias),
            load_row_parallel(
                weights, f"{self._name}.{names.output}", parallel.shard(shape.queries), hidden, variant.output_bias
            ),
            self._head_norm(names.query_norm, parallel.shard(shape.heads)),
            self._head_norm(names.key_norm, parallel.shard(shape.kv_heads, shape.kv_copies)) if keeps else None,
            self._config.rotation(self._index),
            variant.norm_after_rotation,
            row_norm=self._row_norm(),
            value_norm=self._value_norm() if keeps else None,
        )

    def _order(self) -> Tensor | None:
        rope = self._config.ropes[self._config.rotation(self._index)]
        if rope is None:
            return None
        return rotary_order(self._shape.head_dim, rope.rotated(self._shape.head_dim), self._variant.interleaved)

    def _head_norm(self, name: str, heads: Shard) -> HeadNorm | None:
        config, variant, weights, size = self._config, self._variant, self._weights, self._shape.head_dim
        name, order = f"{self._name}.{name}", self._order()
        if variant.own_head_norms:
            names = [name.format(head) for head in range(heads.total)] if "{}" in name else name
            return HeadLayerNorm(weights, names, heads, size, config.norm_eps, order)
        if not variant.head_norm:
            return None
        norm = _load_norm(config, variant, weights, name, size)
        if order is not None:
            order = order.to(norm.weight.device)
            norm.weight = norm.weight[order]
            norm.bias = None if norm.bias is None else norm.bias[order]
        return norm

    def _row_norm(self) -> RowNorm | None:
        if not self._variant.row_norm:
            return None
        names, parallel, shape = self._variant.names, self._weights.parallel, self._shape
        rows = parallel.shard(shape.queries), parallel.shard(shape.keys, shape.kv_copies)
        tensors = [f"{self._name}.{name}" for name in (names.query_norm, names.key_norm)]
        return RowRMSNorm(self._weights, tensors, rows, self._config.norm_eps, shape.kv_copies)

    def _value_norm(self) -> HeadNorm | None:
        if not self._variant.value_norm:
            return None
        return UnweightedNorm(self._weights, self._shape.head_dim, self._config.norm_eps)

    def _mlp(self) -> MlpPart:
        config, variant, weights, names = self._config, self._variant, self._weights, self._variant.names
        size = variant.mlp_sizes[self._index] if variant.mlp_sizes else config.intermediate_size
        hidden, bias, width = config.hidden_size, variant.mlp_bias, weights.parallel.part(size)
        gate, up, down = (f"{self._name}.{name}" for name in (names.gate, names.up, names.down))
        first: Projection
        if variant.gated:
            first = load_gated(weights, gate, up, hidden, width, bias, config.activation)
        elif config.activation == "xielu":
            first = load_xielu(weights, up, f"{self._name}.mlp.act_fn", hidden, width, bias)
        else:
            first = load_fused(weights, [up], hidden, [width], bias, activation=config.activation)
        return MlpPart(first, load_row_parallel(weights, down, width, hidden, bias))

    def _norm(self, name: str | None) -> Norm | None:
        if name is None:
            return None
        return _load_norm(self._config, self._variant, self._weights, f"{self._name}.{name}", self._config.hidden_size)


def decoder_config(
    raw: Json,
    *,
    num_kv_heads: int | None = None,
    max_position_embeddings: int,
    head_dim: int | None = None,
    windows: tuple[int | None, ...] | None = None,
    norm_eps: str = "rms_norm_eps",
) -> ModelConfig:
    """Return the ModelConfig of the config.json; the keywords are the family's defaults.

    `norm_eps` is the name of the norms' epsilon in config.json.
    """
    hidden, heads, layers = (
        require(raw, "hidden_size"),
        require(raw, "num_attention_heads"),
        require(raw, "num_hidden_layers"),
    )
    positions = require(raw, "max_position_embeddings", max_position_embeddings)
    kv_heads = optional(raw, "num_key_value_heads", num_kv_heads) or heads
    check_heads(heads, kv_heads)
    dim = optional(raw, "head_dim") or head_dim or hidden // heads
    rope = rope_config(raw, positions)
    if dim % 2 or rope.rotated(dim) % 2:
        raise ModelLoadError(f"config.json has heads of {dim} numbers, {rope.rotated(dim)} rotated; both must be even")
    return ModelConfig(
        architecture=str(raw["architectures"][0]),
        vocab_size=require(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=require(raw, "intermediate_size"),
        max_position_embeddings=positions,
        norm_eps=float(raw.get(norm_eps, 1e-6)),
        activation=str(raw.get("hidden_act", "silu")),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        layers=tuple(
            AttentionShape(heads, kv_heads, dim, dim**-0.5, AttentionPattern(window=window))
            for window in windows or (None,) * layers
        ),
        ropes=(rope,),
    )
