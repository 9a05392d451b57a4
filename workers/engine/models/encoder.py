"""Implement the encoder shared by BERT, RoBERTa, DistilBERT and MPNet: learned positions, attention
to both sides, layer norms after each part.
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
from workers.engine.layers.linear import load_fused, load_row_parallel
from workers.engine.layers.norm import LayerNorm
from workers.engine.layers.weights import Weights
from workers.engine.messages.errors import ModelLoadError
from workers.engine.models.base import EncoderModel
from workers.engine.models.config import Json, ModelConfig, require


@dataclass(frozen=True, slots=True)
class EncoderNames:
    """The tensor names of a family's layers."""

    layers: str
    queries: str
    keys: str
    values: str
    output: str
    attention_norm: str
    up: str
    down: str
    mlp_norm: str


BERT_NAMES = EncoderNames(
    layers="*.encoder.layer",
    queries="attention.self.query",
    keys="attention.self.key",
    values="attention.self.value",
    output="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    up="intermediate.dense",
    down="output.dense",
    mlp_norm="output.LayerNorm",
)


class PostNormEncoder(EncoderModel):
    def __init__(
        self, config: ModelConfig, names: EncoderNames, weights: Weights, first_position: int = 0, types: int = 0
    ) -> None:
        """Load the encoder.

        `first_position` is the row of a text's first token in the table of positions; `types` is
        the number of token types.
        """
        super().__init__(weights)
        hidden, rows = config.hidden_size, first_position + config.max_position_embeddings
        self.embedding = weights.ops.table(
            weights.take_table("*.embeddings.word_embeddings.weight", config.vocab_size, hidden)
        )
        positions = weights.take("*.embeddings.position_embeddings.weight", (rows, hidden))
        self.position_embedding = positions[first_position:]
        self.type_embedding: Tensor | None = None
        if types:
            self.type_embedding = weights.take("*.embeddings.token_type_embeddings.weight", (types, hidden))
        self.norm = LayerNorm(weights, "*.embeddings.LayerNorm", hidden, config.norm_eps)
        layers = [_layer(config, names, weights, layer) for layer in range(len(config.layers))]
        self.stack = weights.ops.stack(layers, None, post_norm=True)

    def forward(self, input_ids: Tensor, positions: Tensor, types: Tensor | None, attend: AttentionContext) -> Tensor:
        embedded = self.embedding.rows(input_ids).add_(self.position_embedding[positions])
        if self.type_embedding is not None:
            embedded.add_(self.type_embedding[0 if types is None or len(self.type_embedding) == 1 else types])
        return self.stack(self.norm(embedded), [], attend)


def _layer(config: ModelConfig, names: EncoderNames, weights: Weights, layer: int) -> DecoderLayer:
    name, hidden, eps = f"{names.layers}.{layer}", config.hidden_size, config.norm_eps
    heads, width = weights.parallel.shard(hidden), weights.parallel.part(config.intermediate_size)
    projections = [f"{name}.{part}" for part in (names.queries, names.keys, names.values)]
    attention = AttentionPart(
        config.layers[layer],
        load_fused(weights, projections, hidden, [heads] * 3, bias=True),
        load_row_parallel(weights, f"{name}.{names.output}", heads, hidden, bias=True),
    )
    mlp = MlpPart(
        load_fused(weights, [f"{name}.{names.up}"], hidden, [width], bias=True, activation=config.activation),
        load_row_parallel(weights, f"{name}.{names.down}", width, hidden, bias=True),
    )
    return DecoderLayer(
        attention,
        mlp,
        LayerNorm(weights, f"{name}.{names.attention_norm}", hidden, eps),
        LayerNorm(weights, f"{name}.{names.mlp_norm}", hidden, eps),
    )


def encoder_config(raw: Json, max_positions: int, norm_eps: float = 1e-12) -> ModelConfig:
    """Return the ModelConfig of a config.json with BERT's names; missing values default to
    BERT-base's.

    Raises ModelLoadError for options of the family that this class lacks.
    """
    if raw.get("is_decoder") or raw.get("position_embedding_type", "absolute") != "absolute":
        raise ModelLoadError("config.json asks for a decoder or for relative positions, which are not supported here")
    layers = require(raw, "num_hidden_layers", 12)
    return bidirectional_config(
        {"vocab_size": 30522, "intermediate_size": 3072, **raw},
        max_position_embeddings=max_positions,
        norm_eps=float(raw.get("layer_norm_eps", norm_eps)),
        activation=str(raw.get("hidden_act", "gelu")),
        patterns=(AttentionPattern(causal=False),) * layers,
    )


def bidirectional_config(
    raw: Json,
    *,
    max_position_embeddings: int,
    norm_eps: float,
    activation: str,
    patterns: tuple[AttentionPattern, ...],
) -> ModelConfig:
    """Return the ModelConfig of an encoder with the names of BERT's config.json; `patterns` has one
    entry per layer.
    """
    hidden, heads = require(raw, "hidden_size", 768), require(raw, "num_attention_heads", 12)
    dim = hidden // heads
    return ModelConfig(
        architecture=str(raw["architectures"][0]),
        vocab_size=require(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=require(raw, "intermediate_size"),
        max_position_embeddings=max_position_embeddings,
        norm_eps=norm_eps,
        activation=activation,
        tie_word_embeddings=True,
        layers=tuple(AttentionShape(heads, heads, dim, dim**-0.5, pattern) for pattern in patterns),
    )
