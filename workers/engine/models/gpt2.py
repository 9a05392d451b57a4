"""Implement GPT-2: learned positions, layer norms, a plain MLP, projections stored as [in, out]."""

from __future__ import annotations

from torch import Tensor

from workers.engine.layers.base import AttentionContext, AttentionPart, AttentionShape, DecoderLayer, MlpPart
from workers.engine.layers.linear import load_fused, load_row_parallel
from workers.engine.layers.norm import LayerNorm
from workers.engine.layers.weights import Weights
from workers.engine.messages.errors import ModelLoadError
from workers.engine.models.base import DecoderModel, load_tables
from workers.engine.models.config import Json, ModelConfig, require


def config(raw: Json) -> ModelConfig:
    if raw.get("add_cross_attention"):
        raise ModelLoadError("config.json asks for cross attention; only decoders are supported")
    hidden, heads, layers = require(raw, "n_embd", 768), require(raw, "n_head", 12), require(raw, "n_layer", 12)
    scale = (hidden // heads) ** -0.5 if raw.get("scale_attn_weights", True) else 1.0
    by_layer = bool(raw.get("scale_attn_by_inverse_layer_idx", False))
    return ModelConfig(
        architecture=str(raw["architectures"][0]),
        vocab_size=require(raw, "vocab_size", 50257),
        hidden_size=hidden,
        intermediate_size=raw.get("n_inner") or 4 * hidden,
        max_position_embeddings=require(raw, "n_positions", 1024),
        norm_eps=float(raw.get("layer_norm_epsilon", 1e-5)),
        activation=str(raw.get("activation_function", "gelu_new")),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", True)),
        layers=tuple(
            AttentionShape(heads, heads, hidden // heads, scale / (layer + 1) if by_layer else scale)
            for layer in range(layers)
        ),
    )


def build(raw: Json, config: ModelConfig, weights: Weights, max_model_len: int) -> GPT2:
    return GPT2(config, weights)


class GPT2(DecoderModel):
    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        self.embedding, self.lm_head = load_tables(weights, config, "*.wte.weight")
        self.position_embedding = weights.take("*.wpe.weight", (config.max_position_embeddings, config.hidden_size))
        layers = [_layer(config, weights, layer) for layer in range(len(config.layers))]
        norm = LayerNorm(weights, "*.ln_f", config.hidden_size, config.norm_eps)
        self.stack = weights.ops.stack(layers, norm)

    def forward(self, input_ids: Tensor, positions: Tensor, lengths: Tensor, attend: AttentionContext) -> Tensor:
        return self.stack(self.embedding.rows(input_ids).add_(self.position_embedding[positions]), [], attend)


def _layer(config: ModelConfig, weights: Weights, layer: int) -> DecoderLayer:
    name, hidden, shape = f"*.h.{layer}", config.hidden_size, config.layers[layer]
    heads, width = weights.parallel.shard(shape.queries), weights.parallel.part(config.intermediate_size)
    qkv = [heads.within(part, 3) for part in range(3)]
    attention = AttentionPart(
        shape,
        load_fused(weights, [f"{name}.attn.c_attn"] * 3, hidden, qkv, bias=True, transposed=True),
        load_row_parallel(weights, f"{name}.attn.c_proj", heads, hidden, bias=True, transposed=True),
    )
    mlp = MlpPart(
        load_fused(weights, [f"{name}.mlp.c_fc"], hidden, [width], True, transposed=True, activation=config.activation),
        load_row_parallel(weights, f"{name}.mlp.c_proj", width, hidden, bias=True, transposed=True),
    )
    return DecoderLayer(
        attention,
        mlp,
        LayerNorm(weights, f"{name}.ln_1", hidden, config.norm_eps),
        LayerNorm(weights, f"{name}.ln_2", hidden, config.norm_eps),
    )
