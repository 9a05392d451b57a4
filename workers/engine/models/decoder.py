"""Implement the decoder shared by Llama, Mistral, Qwen2 and Qwen3: RMS norms, rotary positions, a
gated MLP.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from workers.engine.layers.base import (
    AttentionContext,
    AttentionPart,
    AttentionPattern,
    AttentionShape,
    DecoderLayer,
    MlpPart,
)
from workers.engine.layers.linear import load_fused, load_gated, load_row_parallel
from workers.engine.layers.norm import RMSNorm
from workers.engine.layers.rotary import Rotary
from workers.engine.layers.weights import Weights
from workers.engine.messages.errors import ModelLoadError
from workers.engine.models.base import DecoderModel, load_tables
from workers.engine.models.config import Json, ModelConfig, require, rope_config


@dataclass(frozen=True, slots=True)
class DecoderVariant:
    """The differences between the families."""

    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_norm: bool = False  # RMS norm over each query and key head before rotation


class RotaryDecoder(DecoderModel):
    prefix = "model."

    def __init__(self, config: ModelConfig, variant: DecoderVariant, weights: Weights, max_model_len: int) -> None:
        super().__init__(config, weights)
        assert config.rope is not None
        self.embedding, self.lm_head = load_tables(weights, config, "*.embed_tokens.weight")
        self.rotary = Rotary(config.rope, config.layers[0].head_dim, max_model_len, weights.dtype, weights.device)
        layers = [_layer(config, variant, weights, layer) for layer in range(len(config.layers))]
        norm = RMSNorm(weights, "*.norm", config.hidden_size, config.norm_eps)
        self.stack = weights.ops.stack(layers, norm)

    def forward(self, input_ids: Tensor, positions: Tensor, lengths: Tensor, attend: AttentionContext) -> Tensor:
        return self.stack(self.embedding.rows(input_ids), [self.rotary.cos_sin(positions, lengths)], attend)


def _layer(config: ModelConfig, variant: DecoderVariant, weights: Weights, layer: int) -> DecoderLayer:
    name, hidden, eps, shape = f"*.layers.{layer}", config.hidden_size, config.norm_eps, config.layers[layer]
    queries, keys = weights.parallel.shard(shape.queries), weights.parallel.shard(shape.keys, shape.kv_copies)
    width = weights.parallel.part(config.intermediate_size)
    projections = [f"{name}.self_attn.{part}_proj" for part in "qkv"]
    query_norm, key_norm = (
        RMSNorm(weights, f"{name}.self_attn.{part}_norm", shape.head_dim, eps) if variant.head_norm else None
        for part in "qk"
    )
    gate, up = f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj"
    attention = AttentionPart(
        shape,
        load_fused(weights, projections, hidden, [queries, keys, keys], variant.qkv_bias),
        load_row_parallel(weights, f"{name}.self_attn.o_proj", queries, hidden, variant.output_bias),
        query_norm,
        key_norm,
    )
    mlp = MlpPart(
        load_gated(weights, gate, up, hidden, width, variant.mlp_bias, config.activation),
        load_row_parallel(weights, f"{name}.mlp.down_proj", width, hidden, variant.mlp_bias),
    )
    return DecoderLayer(
        attention,
        mlp,
        RMSNorm(weights, f"{name}.input_layernorm", hidden, eps),
        RMSNorm(weights, f"{name}.post_attention_layernorm", hidden, eps),
    )


def decoder_config(
    raw: Json,
    *,
    num_kv_heads: int | None = None,
    max_position_embeddings: int,
    head_dim: int | None = None,
    windows: tuple[int | None, ...] | None = None,
) -> ModelConfig:
    """Return the ModelConfig of the config.json; the keywords are the family's defaults."""
    hidden, heads, layers = (
        require(raw, "hidden_size"),
        require(raw, "num_attention_heads"),
        require(raw, "num_hidden_layers"),
    )
    positions = require(raw, "max_position_embeddings", max_position_embeddings)
    kv_heads = raw.get("num_key_value_heads", num_kv_heads) or heads
    if heads % kv_heads:
        raise ModelLoadError(f"config.json has {heads} attention heads, which {kv_heads} key-value heads do not divide")
    dim = raw.get("head_dim") or head_dim or hidden // heads
    return ModelConfig(
        architecture=str(raw["architectures"][0]),
        vocab_size=require(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=require(raw, "intermediate_size"),
        max_position_embeddings=positions,
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        activation=str(raw.get("hidden_act", "silu")),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        layers=tuple(
            AttentionShape(heads, kv_heads, dim, dim**-0.5, AttentionPattern(window=window))
            for window in windows or (None,) * layers
        ),
        rope=rope_config(raw, positions),
    )
