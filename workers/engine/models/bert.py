"""Implement BERT and models of the same shape: MiniLM, BGE, E5."""

from __future__ import annotations

from collections.abc import Sequence

from workers.engine.layers.base import Projection
from workers.engine.layers.weights import Weights
from workers.engine.models.config import Json, ModelConfig, require
from workers.engine.models.encoder import BERT_NAMES, PostNormEncoder, encoder_config
from workers.engine.models.head import load_dense


def config(raw: Json) -> ModelConfig:
    return encoder_config(raw, require(raw, "max_position_embeddings", 512))


def build(raw: Json, config: ModelConfig, weights: Weights, max_model_len: int) -> PostNormEncoder:
    return PostNormEncoder(config, BERT_NAMES, weights, types=require(raw, "type_vocab_size", 2))


def head(raw: Json, config: ModelConfig, weights: Weights, labels: int) -> Sequence[Projection]:
    size = config.hidden_size
    return [
        load_dense(weights, "*.pooler.dense", size, size, activation="tanh"),
        load_dense(weights, "classifier", size, labels),
    ]
