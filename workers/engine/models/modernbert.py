"""Implement ModernBERT: norms before each part, gated MLPs, rotary positions, and layers with local
attention between layers with global attention.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from workers.engine.layers.base import (
    AttentionContext,
    AttentionPart,
    AttentionPattern,
    DecoderLayer,
    MlpPart,
    Projection,
)
from workers.engine.layers.linear import load_fused, load_row_parallel
from workers.engine.layers.norm import LayerNorm
from workers.engine.layers.rotary import Rotary
from workers.engine.layers.weights import Weights
from workers.engine.messages.errors import ModelLoadError
from workers.engine.models.base import EncoderModel
from workers.engine.models.config import Json, ModelConfig, require, rope_config, rope_parameters_of
from workers.engine.models.encoder import bidirectional_config
from workers.engine.models.head import load_dense, load_norm

_EVERYTHING, _NEIGHBORS = "full_attention", "sliding_attention"
_THETAS = {_EVERYTHING: ("global_rope_theta", 160_000.0), _NEIGHBORS: ("local_rope_theta", 10_000.0)}


def config(raw: Json) -> ModelConfig:
    layers, window = require(raw, "num_hidden_layers", 22), require(raw, "local_attention", 128) // 2
    patterns = {_EVERYTHING: AttentionPattern(causal=False), _NEIGHBORS: AttentionPattern(False, window)}
    return bidirectional_config(
        {"vocab_size": 50368, "intermediate_size": 1152, **raw},
        max_position_embeddings=require(raw, "max_position_embeddings", 8192),
        norm_eps=float(raw.get("norm_eps", 1e-5)),
        activation=str(raw.get("hidden_activation", "gelu")),
        patterns=tuple(patterns[kind] for kind in _layer_kinds(raw, layers)),
    )


def build(raw: Json, config: ModelConfig, weights: Weights, max_model_len: int) -> ModernBert:
    return ModernBert(raw, config, weights, max_model_len)


def head(raw: Json, config: ModelConfig, weights: Weights, labels: int) -> Sequence[Projection]:
    size, bias = config.hidden_size, bool(raw.get("classifier_bias", False))
    activation = str(raw.get("classifier_activation", "gelu"))
    return [
        load_dense(weights, "head.dense", size, size, bias=bias, activation=activation),
        load_norm(weights, "head.norm", size, config.norm_eps, bias=bool(raw.get("norm_bias", False))),
        load_dense(weights, "classifier", size, labels),
    ]


def head_modes(raw: Json) -> tuple[str, ...]:
    return (str(raw.get("classifier_pooling", "cls")),)


class ModernBert(EncoderModel):
    def __init__(self, raw: Json, config: ModelConfig, weights: Weights, max_model_len: int) -> None:
        super().__init__(weights)
        kinds = _layer_kinds(raw, len(config.layers))
        self.embedding = weights.ops.table(
            weights.take_table("*.embeddings.tok_embeddings.weight", config.vocab_size, config.hidden_size)
        )
        self.norm = _norm(raw, config, weights, "*.embeddings.norm")
        ropes = [rope_config(each, config.max_position_embeddings) for each in _ropes(raw)]
        dim = config.layers[0].head_dim
        self.rotaries = [Rotary(rope, dim, max_model_len, weights.dtype, weights.device) for rope in ropes]
        layers = [_layer(raw, config, weights, layer, list(_THETAS).index(kind)) for layer, kind in enumerate(kinds)]
        last = _norm(raw, config, weights, "*.final_norm")
        self.stack = weights.ops.stack(layers, last)

    def forward(self, input_ids: Tensor, positions: Tensor, types: Tensor | None, attend: AttentionContext) -> Tensor:
        rotations = [rotary.cos_sin(positions, positions) for rotary in self.rotaries]
        return self.stack(self.norm(self.embedding.rows(input_ids)), rotations, attend)


def _layer(raw: Json, config: ModelConfig, weights: Weights, layer: int, rotation: int) -> DecoderLayer:
    name, hidden, bias = f"*.layers.{layer}", config.hidden_size, bool(raw.get("attention_bias", False))
    mlp_bias, heads = bool(raw.get("mlp_bias", False)), weights.parallel.shard(hidden)
    width = weights.parallel.part(config.intermediate_size)
    halves = [width.within(part, 2) for part in range(2)]
    gated = [f"{name}.mlp.Wi.weight"] * 2, [f"{name}.mlp.Wi.bias"] * 2
    biases = weights.take_rows(gated[1], halves) if mlp_bias else None
    attention = AttentionPart(
        config.layers[layer],
        load_fused(weights, [f"{name}.attn.Wqkv"] * 3, hidden, [heads.within(part, 3) for part in range(3)], bias),
        load_row_parallel(weights, f"{name}.attn.Wo", heads, hidden, bias),
        rotation=rotation,
    )
    mlp = MlpPart(
        weights.ops.gated_linear(weights.take_matrix(gated[0], halves, hidden), biases, config.activation),
        load_row_parallel(weights, f"{name}.mlp.Wo", width, hidden, mlp_bias),
    )
    attention_norm = _norm(raw, config, weights, f"{name}.attn_norm") if layer else None
    return DecoderLayer(attention, mlp, attention_norm, _norm(raw, config, weights, f"{name}.mlp_norm"))


def _norm(raw: Json, config: ModelConfig, weights: Weights, name: str) -> LayerNorm:
    return LayerNorm(weights, name, config.hidden_size, config.norm_eps, bias=bool(raw.get("norm_bias", False)))


def _layer_kinds(raw: Json, layers: int) -> list[str]:
    """Return each layer's kind. Raise ModelLoadError for an unknown kind."""
    every = require(raw, "global_attn_every_n_layers", 3)
    kinds = raw.get("layer_types") or [_NEIGHBORS if layer % every else _EVERYTHING for layer in range(layers)]
    if len(kinds) != layers or not set(kinds) <= set(_THETAS):
        raise ModelLoadError(f"config.json has layer_types {kinds}, which do not suit {layers} layers of ModernBERT")
    return [str(kind) for kind in kinds]


def _ropes(raw: Json) -> list[Json]:
    """Return the rotary settings of each kind of layer, in the form for `rope_config`."""
    bases = (raw.get(name, theta) for name, theta in _THETAS.values())
    given = rope_parameters_of(raw, list(_THETAS))
    return [{"rope_parameters": {"rope_theta": base, **each}} for base, each in zip(bases, given, strict=True)]
