"""Implement DistilBERT: BERT with half the layers, without token types, under its own tensor
names.
"""

from __future__ import annotations

from collections.abc import Sequence

from workers.engine.layers.base import Projection
from workers.engine.layers.weights import Weights
from workers.engine.models.config import Json, ModelConfig, require
from workers.engine.models.encoder import EncoderNames, PostNormEncoder, encoder_config
from workers.engine.models.head import load_dense

_NAMES = EncoderNames(
    layers="*.transformer.layer",
    queries="attention.q_lin",
    keys="attention.k_lin",
    values="attention.v_lin",
    output="attention.out_lin",
    attention_norm="sa_layer_norm",
    up="ffn.lin1",
    down="ffn.lin2",
    mlp_norm="output_layer_norm",
)


def config(raw: Json) -> ModelConfig:
    named = {
        "hidden_size": require(raw, "dim", 768),
        "intermediate_size": require(raw, "hidden_dim", 3072),
        "num_hidden_layers": require(raw, "n_layers", 6),
        "num_attention_heads": require(raw, "n_heads", 12),
        "hidden_act": raw.get("activation", "gelu"),
    }
    return encoder_config({**raw, **named}, require(raw, "max_position_embeddings", 512))


def build(raw: Json, config: ModelConfig, weights: Weights, max_model_len: int) -> PostNormEncoder:
    return PostNormEncoder(config, _NAMES, weights)


def head(raw: Json, config: ModelConfig, weights: Weights, labels: int) -> Sequence[Projection]:
    size = config.hidden_size
    return [
        load_dense(weights, "pre_classifier", size, size, activation="relu"),
        load_dense(weights, "classifier", size, labels),
    ]
